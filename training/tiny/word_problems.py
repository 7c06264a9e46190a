"""Worked arithmetic problems from many small families, so that no template is seen often enough to be learnt by heart.

Ninety templates alone teach a tiny target ninety stories: on an unseen story it answers with fragments of them. Each
family here draws its people, things, numbers, number of steps and the wording of every sentence, and the solution
quotes the question's own words, which is what carries over to new stories.

    python -m training.tiny.word_problems --count 5        # prints a few
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from training.tiny.dialogues import gsm_dialogue
from training.tiny.documents import Dialogue
from training.tiny.problem_words import (
    CURRENCIES,
    GOODS,
    NAMES,
    PEOPLE,
    PLACES,
    SMALL_THINGS,
    VEHICLES,
    WORKERS,
    number,
    plural,
    vary,
)


@dataclass
class Story:
    """A problem under construction: sentences of the question, lines of the solution, and the answer."""

    rng: Random
    question: list[str] = field(default_factory=list)
    solution: list[str] = field(default_factory=list)
    answer: float = 0

    def tell(self, text: str) -> None:
        self.question.append(vary(self.rng, text))

    def solve(self, text: str) -> None:
        self.solution.append(vary(self.rng, text))

    def names(self, count: int) -> list[str]:
        return self.rng.sample(NAMES, count)

    def up_to(self, high: int, low: int = 2) -> int:
        return self.rng.randint(low, high)

    def of(self, words: tuple | list):
        return self.rng.choice(words)


def changes(story: Story) -> None:
    """A quantity that grows and shrinks."""
    (name, other), things = story.names(2), story.of(SMALL_THINGS)
    total = story.up_to(120, 20)
    story.tell(f"{name} [has|starts with|owns|collected] {total} {things}[| in a box| at home].")
    for _ in range(story.up_to(4)):
        kind, amount = story.of(("gain", "loss", "half", "double", "groups")), story.up_to(40)
        if kind == "loss" and amount < total:
            story.tell(f"{name} [gives {amount} of them to {other}|loses {amount} of them|sells {amount} {things}].")
            story.solve(
                f"[{name} has|After that there are|This leaves] {total} - {amount} = {total - amount} {things}[| left]."
            )
            total -= amount
        elif kind == "half" and total % 2 == 0:
            story.tell(f"[Then half of the {things} are given away|Half of them go to {other}].")
            story.solve(f"[Half of {total} is|{name} keeps] {total} / 2 = {total // 2} {things}.")
            total //= 2
        elif kind == "double" and total < 200:
            story.tell(
                f"[After a month|Later|Then] {name} [doubles the number of {things}|has twice as many {things}]."
            )
            story.solve(f"[Now {name} has|That makes] {total} * 2 = {total * 2} {things}.")
            total *= 2
        elif kind == "groups":
            groups, each, holder = story.up_to(6), story.up_to(12), story.of(("bags", "boxes", "packs"))
            story.tell(f"{name} [buys|gets|finds] {groups} {holder} [with|of] {each} {things} each.")
            story.solve(f"The {holder} hold {groups} * {each} = {groups * each} {things}.")
            story.solve(
                f"[Now {name} has|Together that is] {total} + {groups * each} = {total + groups * each} {things}."
            )
            total += groups * each
        else:
            story.tell(f"{name} [buys|finds|receives|picks] {amount} [more {things}|{things} more].")
            story.solve(f"[Then {name} has|That makes|Now there are] {total} + {amount} = {total + amount} {things}.")
            total += amount
    story.tell(f"How many {things} does {name} have [now|in the end|at the end]?")
    story.answer = total


def shopping(story: Story) -> None:
    """A bill of several goods, with a coupon or a budget."""
    (name,), money, total = story.names(1), story.of(CURRENCIES), 0
    goods = story.rng.sample(GOODS, story.up_to(4))
    story.tell(f"{name} [goes to|shops at|visits] the {story.of(PLACES)}[| on Saturday| after work].")
    costs = []
    for item in goods:
        count, price = story.up_to(9), story.up_to(30)
        story.tell(
            f"{name} [buys|takes|gets] {count} {plural(item)} [for|at] {money}{price} each."
            if story.rng.random() < 0.6
            else f"[One|Each] {item} costs {money}{price} and {name} buys {count} of them."
        )
        story.solve(f"The {plural(item)} cost {count} * {money}{price} = {money}{count * price}.")
        costs.append(count * price)
        total += count * price
    sum_text = " + ".join(f"{money}{cost}" for cost in costs)
    story.solve(f"[In total|Altogether|All together], {name} [spends|pays] {sum_text} = {money}{total}.")
    kind = story.of(("total", "coupon", "change", "percent"))
    if kind == "coupon":
        off = story.up_to(max(3, total // 4))
        story.tell(f"[A coupon takes|The clerk takes] {money}{off} off the [bill|total]. How much does {name} pay?")
        story.solve(f"[With the coupon|After that], {name} pays {money}{total} - {money}{off} = {money}{total - off}.")
        total -= off
    elif kind == "change":
        given = total + story.up_to(60, 1)
        story.tell(f"{name} [had|brought|has] {money}{given}. How much money [is left|does {name} have left]?")
        story.solve(f"{name} has {money}{given} - {money}{total} = {money}{given - total} left.")
        total = given - total
    elif kind == "percent":
        percent = story.of((10, 20, 25, 50))
        off = total * percent / 100
        story.tell(f"There is a discount of {percent}%. How much [does {name} pay|is the bill]?")
        story.solve(f"The discount is {money}{total} * {percent}% = {money}{number(off)}.")
        story.solve(f"So {name} pays {money}{total} - {money}{number(off)} = {money}{number(total - off)}.")
        total -= off
    else:
        story.tell(f"How much [does {name} spend|does {name} pay|do they cost] [in total|altogether]?")
    story.answer = total


def wages(story: Story) -> None:
    """Work by the hour, with days, weeks and deductions."""
    (name,), worker, money = story.names(1), story.of(WORKERS), story.of(CURRENCIES)
    hourly, hours, days = story.up_to(40, 8), story.up_to(10, 3), story.up_to(6)
    story.tell(f"{name} [is|works as] a {worker} and [earns|makes|is paid] {money}{hourly} [per|an|each] hour.")
    story.tell(f"{name} works {hours} hours [a|each|per] day, {days} days [a|per] week.")
    story.solve(f"{name} [earns|makes] {money}{hourly} * {hours} = {money}{hourly * hours} [a|per] day.")
    total = hourly * hours * days
    story.solve(f"[In a week|Each week] {name} [earns|makes] {money}{hourly * hours} * {days} = {money}{total}.")
    if story.rng.random() < 0.5:
        weeks = story.up_to(8)
        story.solve(f"In {weeks} weeks that is {money}{total} * {weeks} = {money}{total * weeks}.")
        period, total = f"in {weeks} weeks", total * weeks
    else:
        period = story.of(("a week", "each week", "per week"))
    if story.rng.random() < 0.5:
        cost = story.up_to(max(3, total // 3))
        story.tell(
            f"{name} [pays|spends] {money}{cost} [on|for] [tools|rent|bus tickets|lunch|materials] in that time."
        )
        story.solve(f"After [the costs|paying] {name} keeps {money}{total} - {money}{cost} = {money}{total - cost}.")
        total -= cost
        story.tell(f"How much [money|] does {name} [keep|have left] {period}?")
    else:
        story.tell(f"How much [money|] does {name} [earn|make] {period}?")
    story.answer = total


def comparison(story: Story) -> None:
    """A chain of people, each with so many times, more or fewer than the one before."""
    people, things = story.names(story.up_to(5, 3)), story.of(SMALL_THINGS)
    verb, past = story.of(
        (("has", "have"), ("picks", "pick"), ("buys", "buy"), ("counts", "count"), ("makes", "make"))
    )
    amounts = [story.up_to(40, 5)]
    lines = [f"{people[0]} {verb} {amounts[0]} {things}."]
    for before, name in zip(people, people[1:], strict=False):
        last, kind = amounts[-1], story.of(("times", "more", "fewer", "half"))
        if kind == "times" and last < 200:
            times = story.up_to(5)
            word = {2: "twice", 3: story.of(("3 times", "three times"))}.get(times, f"{times} times")
            lines.append(f"{name} {verb} {word} as many {things} as {before}.")
            story.solve(f"{name} {verb} {last} * {times} = {last * times} {things}.")
            amounts.append(last * times)
        elif kind == "fewer" and last > 3:
            less = story.up_to(last - 1, 1)
            lines.append(f"{name} {verb} {less} [fewer|less] {things} than {before}.")
            story.solve(f"{name} {verb} {last} - {less} = {last - less} {things}.")
            amounts.append(last - less)
        elif kind == "half" and last % 2 == 0:
            lines.append(f"{name} {verb} half as many {things} as {before}.")
            story.solve(f"{name} {verb} {last} / 2 = {last // 2} {things}.")
            amounts.append(last // 2)
        else:
            more = story.up_to(30)
            lines.append(f"{name} {verb} {more} more {things} than {before}.")
            story.solve(f"{name} {verb} {last} + {more} = {last + more} {things}.")
            amounts.append(last + more)
    for line in lines if story.rng.random() < 0.6 else lines[::-1]:
        story.tell(line)
    if story.rng.random() < 0.7:
        story.answer = sum(amounts)
        sum_text = " + ".join(map(str, amounts))
        story.solve(f"[Together|In total|Altogether] they {past} {sum_text} = {story.answer} {things}.")
        story.tell(f"How many {things} do they {past} [together|in total|altogether]?")
    else:
        story.answer = amounts[-1]
        story.tell(f"How many {things} does {people[-1]} {past}?")


def parts_of_group(story: Story) -> None:
    """Shares of a group by percent or fraction, and what is left."""
    people, place = story.of(PEOPLE), story.of(PLACES)
    left = total = story.of((40, 60, 80, 100, 120, 160, 200, 240, 300, 400, 500))
    story.tell(f"[There are {total} {people} in the {place}|A {place} has {total} {people}].")
    doings = ["wear a hat", "play chess", "like music", "come by bus", "speak French", "leave early", "bring lunch"]
    for doing in story.rng.sample(doings, story.up_to(3, 1)):
        if story.rng.random() < 0.5:
            percent = story.of((5, 10, 15, 20, 25, 30))
            part = total * percent // 100
            story.tell(f"{percent}% of [them|the {people}] {doing}.")
            story.solve(f"{total} * {percent}% = {part} {people} {doing}.")
        else:
            below = story.of((4, 5, 10))
            part = total // below
            story.tell(f"1/{below} of [them|the {people}] {doing}.")
            story.solve(f"{total} * 1/{below} = {part} {people} {doing}.")
        if part <= left:
            story.solve(f"[That leaves|This leaves] {left} - {part} = {left - part} {people}.")
            left -= part
    story.tell(f"How many {people} [are left|remain|do none of this]?")
    story.answer = left


def travel(story: Story) -> None:
    """Distance, speed and time over several legs."""
    (name,), vehicle, unit = story.names(1), story.of(VEHICLES), story.of(("miles", "kilometers"))
    asks_time = story.rng.random() < 0.5
    legs = []
    story.tell(f"{name} [travels|makes a trip|goes on a journey] by {vehicle}.")
    for ordinal in ("first", "second", "third")[: story.up_to(3, 1)]:
        speed, hours = story.up_to(14) * 5, story.up_to(8)
        legs.append(hours if asks_time else speed * hours)
        if asks_time:
            story.tell(f"The {ordinal} part is {speed * hours} {unit} [long|] at {speed} {unit} per hour.")
            story.solve(f"The {ordinal} part takes {speed * hours} / {speed} = {hours} hours.")
        else:
            story.tell(f"[For|On] the {ordinal} part {name} [drives|moves] {hours} hours at {speed} {unit} per hour.")
            story.solve(f"The {ordinal} part is {speed} * {hours} = {speed * hours} {unit}.")
    story.answer, unit = sum(legs), "hours" if asks_time else unit
    if len(legs) > 1:
        story.solve(f"The [whole trip|total] is {' + '.join(map(str, legs))} = {story.answer} {unit}.")
    story.tell(f"How many {unit} [is the whole trip|long is the trip]?" if not asks_time else "How long does it take?")


def production(story: Story) -> None:
    """Things made at a rate, packed into boxes, sold."""
    (name,), things, place = story.names(1), story.of(SMALL_THINGS), story.of(PLACES)
    rate, hours, size = story.up_to(30, 4), story.up_to(12), story.of((2, 3, 4, 5, 6, 8, 10, 12))
    rate *= size
    story.tell(f"[In the {place}|At the {place}] {name} [makes|packs|prepares] {rate} {things} [every|per|an] hour.")
    made = rate * hours
    story.tell(f"{name} works for {hours} hours and puts {size} {things} in [each|every] box.")
    story.solve(f"{name} makes {rate} * {hours} = {made} {things}.")
    boxes = made // size
    story.solve(f"[They fill|That is] {made} / {size} = {boxes} boxes.")
    if story.rng.random() < 0.5:
        money, price = story.of(CURRENCIES), story.up_to(20)
        story.tell(
            f"A box [sells for|costs] {money}{price}. How much [money|] [do all boxes bring|are all boxes worth]?"
        )
        story.solve(f"The boxes are worth {boxes} * {money}{price} = {money}{boxes * price}.")
        boxes *= price
    else:
        story.tell(f"How many boxes [does {name} need|are filled]?")
    story.answer = boxes


def schedule(story: Story) -> None:
    """Minutes and hours spent on several tasks, over days."""
    (name,), total, times = story.names(1), 0, []
    tasks = ["reading", "drawing", "running", "cooking", "cleaning", "homework", "swimming", "piano", "gardening"]
    for task in story.rng.sample(tasks, story.up_to(4)):
        minutes = story.up_to(18) * 5
        story.tell(f"{name} spends {minutes} minutes [on|with] {task} [every|each] day.")
        times.append(minutes)
    total = sum(times)
    story.solve(f"{name} spends {' + '.join(map(str, times))} = {total} minutes [a|each|per] day.")
    days = story.up_to(14)
    story.solve(f"In {days} days [this is|that is] {total} * {days} = {total * days} minutes.")
    total *= days
    if total % 60 == 0 and story.rng.random() < 0.7:
        story.solve(f"[That is|This is] {total} / 60 = {total // 60} hours.")
        total //= 60
        story.tell(f"How many hours is that in {days} days?")
    else:
        story.tell(f"How many minutes is that in {days} days?")
    story.answer = total


def savings(story: Story) -> None:
    """Money saved towards a goal."""
    (name,), money, item = story.names(1), story.of(CURRENCIES), story.of(GOODS)
    weekly, weeks, start = story.up_to(30, 3), story.up_to(20), story.up_to(60)
    goal = start + weekly * weeks
    story.tell(f"{name} wants to buy a [new|big|special] {item} [for|that costs] {money}{goal}.")
    story.tell(f"{name} [has|already has|has saved] {money}{start} and saves {money}{weekly} [a|each|every] week.")
    story.tell(f"[How many weeks does it take|After how many weeks can {name} buy it]?")
    story.solve(f"{name} [still needs|needs] {money}{goal} - {money}{start} = {money}{goal - start}.")
    story.solve(f"[It takes|That takes] {money}{goal - start} / {money}{weekly} = {weeks} weeks.")
    story.answer = weeks


def rectangle(story: Story) -> None:
    """Area, perimeter and cost of a field or a floor."""
    thing, money = story.of(("garden", "field", "floor", "wall", "yard", "room", "carpet")), story.of(CURRENCIES)
    unit, (length, width) = story.of(("feet", "meters")), (story.up_to(40, 5), story.up_to(30, 3))
    story.tell(f"A {thing} is {length} {unit} long and {width} {unit} wide.")
    if story.rng.random() < 0.5:
        story.answer = length * width
        story.solve(f"The area [of the {thing}|] is {length} * {width} = {story.answer} square {unit}.")
        measure = f"square {unit[:-1] if unit == 'meters' else 'foot'}"
    else:
        story.answer = 2 * (length + width)
        story.solve(f"The perimeter [of the {thing}|] is 2 * ({length} + {width}) = {story.answer} {unit}.")
        measure = f"{unit[:-1] if unit == 'meters' else 'foot'} around it"
    price = story.up_to(12)
    story.tell(f"[It costs|The owner pays] {money}{price} [for each|per] {measure}. How much does it cost?")
    story.solve(f"[It costs|The cost is] {story.answer} * {money}{price} = {money}{story.answer * price}.")
    story.answer *= price


def ages(story: Story) -> None:
    """Ages of a family, now and in some years."""
    first, second, third = story.names(3)
    age, times, gap, years = story.up_to(15, 4), story.up_to(4), story.up_to(12), story.up_to(20)
    story.tell(f"{first} is {age} years old. {second} is {times} times as old as {first}.")
    story.tell(f"{third} is {gap} years [older|younger] than {second}." if times * age > gap else "")
    older = "older" in story.question[-1]
    story.solve(f"{second} is {age} * {times} = {age * times} years old.")
    last = age * times
    if times * age > gap:
        sign = "+" if older else "-"
        last = last + gap if older else last - gap
        story.solve(f"{third} is {age * times} {sign} {gap} = {last} years old.")
    else:
        third = second
    story.tell(f"How old will {third} be in {years} years?")
    story.solve(f"In {years} years {third} will be {last} + {years} = {last + years} years old.")
    story.answer = last + years


def two_offers(story: Story) -> None:
    """Which of two offers costs less, and by how much."""
    (name,), money, item = story.names(1), story.of(CURRENCIES), story.of(GOODS)
    count, fee = story.up_to(12, 3), story.up_to(20)
    low, high = sorted(story.rng.sample(range(3, 40), 2))
    first, second = count * high, count * low + fee
    story.tell(
        f"{name} needs {count} {plural(item)}. [One|The first] {story.of(PLACES)} sells them at {money}{high} each."
    )
    story.tell(
        f"[Another one|The second one] [asks|sells them for] {money}{low} each but adds {money}{fee} for delivery."
    )
    story.tell("[What is the difference between the two prices|How much more does the more expensive offer cost]?")
    story.solve(f"The first offer costs {count} * {money}{high} = {money}{first}.")
    story.solve(f"The second offer costs {count} * {money}{low} = {money}{count * low}.")
    story.solve(f"With delivery [it costs|that is] {money}{count * low} + {money}{fee} = {money}{second}.")
    high, low = max(first, second), min(first, second)
    story.solve(f"The difference is {money}{high} - {money}{low} = {money}{high - low}.")
    story.answer = high - low


def supplies(story: Story) -> None:
    """A stock that is used up, or shared out evenly."""
    (name,), things, people = story.names(1), story.of(SMALL_THINGS), story.of(PEOPLE)
    each, count, left = story.up_to(12), story.up_to(25, 3), story.up_to(12, 0)
    boxes, size = 1, each * count + left
    for divisor in (2, 3, 4, 5, 6):
        if size % divisor == 0 and story.rng.random() < 0.5:
            boxes, size = divisor, size // divisor
            break
    story.tell(f"{name} has {boxes} [box|bag] of {size} {things}." if boxes == 1 else
               f"{name} [buys|has] {boxes} [boxes|bags] of {size} {things} each.")  # fmt: skip
    if boxes > 1:
        story.solve(f"{name} has {boxes} * {size} = {boxes * size} {things}.")
    story.tell(f"[Each of {count} {people} gets|{count} {people} come and each takes] {each} {things}.")
    story.tell(f"How many {things} [are left|remain|does {name} have left]?")
    story.solve(f"The {people} [get|take] {count} * {each} = {count * each} {things}.")
    story.solve(f"[There are|{name} has] {boxes * size} - {count * each} = {left} {things} left.")
    story.answer = left


FAMILIES: tuple[Callable[[Story], None], ...] = (
    changes, changes, shopping, shopping, wages, comparison, comparison, parts_of_group, travel, production,
    schedule, savings, rectangle, ages, two_offers, supplies,
)  # fmt: skip


def worked_problem(rng: Random) -> dict:
    """One problem with its solution, in reasoning-gym's form (`question`, `answer`, `metadata.answer_cot`)."""
    story = Story(rng)
    rng.choice(FAMILIES)(story)
    answer = number(story.answer)
    question = " ".join(" ".join(story.question).split()).replace(" ?", "?").replace(" .", ".")
    separator = "\n" if rng.random() < 0.8 else " "
    lines = [" ".join(line.split()) for line in story.solution]
    return {"question": question, "answer": answer, "metadata": {"answer_cot": separator.join(lines)}}


def word_problem_dialogues(count: int, seed: int) -> Iterator[Dialogue]:
    """`count` dialogues of worked problems, in the forms of the other worked problems."""
    rng = Random(seed)
    for _ in range(count):
        yield gsm_dialogue(rng, worked_problem(rng))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng = Random(options.seed)
    for _ in range(options.count):
        problem = worked_problem(rng)
        print(f"{problem['question']}\n\n{problem['metadata']['answer_cot']}\n\n{problem['answer']}\n{'-' * 40}")


if __name__ == "__main__":
    main()
