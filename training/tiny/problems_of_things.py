"""Families of worked problems about things that are counted, bought, made and shared."""

from __future__ import annotations

from itertools import pairwise

from training.tiny.problem_words import CURRENCIES, GOODS, PEOPLE, PLACES, SMALL_THINGS
from training.tiny.story import Story, number, plural


def changes(story: Story) -> None:
    """A quantity that grows and shrinks."""
    (name, other), things = story.names(2), story.of(SMALL_THINGS)
    total = story.up_to(120, 20)
    story.tell(f"{name} [has|starts with|owns|collected] {total} {things}[| in a box| at home].")
    for _ in range(story.up_to(4)):
        kind, amount = story.of(("gain", "loss", "half", "double", "groups")), story.up_to(40)
        if kind == "loss" and amount < total:
            story.tell(f"{name} [gives {amount} of them to {other}|loses {amount} of them|sells {amount} {things}].")
            left = total - amount
            story.solve(f"[{name} has|After that there are|This leaves] {total} - {amount} = {left} {things}[| left].")
            total = left
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


def comparison(story: Story) -> None:
    """A chain of people, each with so many times, more or fewer than the one before."""
    people, things = story.names(story.up_to(5, 3)), story.of(SMALL_THINGS)
    verb, past = story.of(
        (("has", "have"), ("picks", "pick"), ("buys", "buy"), ("counts", "count"), ("makes", "make"))
    )
    amounts = [story.up_to(40, 5)]
    lines = [f"{people[0]} {verb} {amounts[0]} {things}."]
    for before, name in pairwise(people):
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
