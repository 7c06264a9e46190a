"""Families of worked problems about money, time, distance, area and age."""

from __future__ import annotations

from training.tiny.problem_words import CURRENCIES, GOODS, PLACES, VEHICLES, WORKERS
from training.tiny.story import Story, plural


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
