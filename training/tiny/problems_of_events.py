"""Families of worked problems about what happens to people: longer stories, several quantities, other questions."""

from __future__ import annotations

from training.tiny.problem_words import CURRENCIES, GOODS, PEOPLE, PLACES, SMALL_THINGS, VEHICLES, WORKERS
from training.tiny.story import Story, number, plural


def recipe(story: Story) -> None:
    """A recipe for some people, cooked for more."""
    (name,), dish = story.names(1), story.of(("soup", "stew", "cake", "salad", "bread", "pasta", "curry", "pudding"))
    unit, food = story.of(("cups", "spoons", "grams", "pounds")), story.of(("flour", "rice", "milk", "sugar", "beans"))
    amount, serves, times = story.up_to(12), story.up_to(8), story.up_to(9)
    story.tell(
        f"[A recipe for|{name}'s recipe for] {dish} [needs|uses|calls for] {amount} {unit} of {food}[ and|, and it]"
    )
    story.tell(f"[serves|is enough for|feeds] {serves} people.")
    story.tell(f"How many {unit} of {food} [does {name} need|are needed] for {serves * times} people?")
    story.solve(
        f"[For {serves * times} people the recipe is|It must be] made {serves * times} / {serves} = {times} times."
    )
    story.solve(f"[That needs|So it takes] {amount} * {times} = {amount * times} {unit} of {food}.")
    story.answer = amount * times


def average(story: Story) -> None:
    """The mean of some counts, or the last count that gives a wanted mean."""
    (name,), things = story.names(1), story.of(SMALL_THINGS)
    days = story.rng.sample(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"], story.up_to(4))
    counts = [story.up_to(40) for _ in days]
    counts[-1] += -sum(counts) % len(counts)
    for day, count in zip(days, counts, strict=True):
        story.tell(f"[On {day}|{day}:] {name} [sold|found|made|counted] {count} {things}.")
    total = sum(counts)
    story.tell(f"[What is the average number of {things}|How many {things} is that on average] [per day|a day]?")
    story.solve(f"[In total|Altogether] {name} has {' + '.join(map(str, counts))} = {total} {things}.")
    story.solve(f"[The average is|On average that is] {total} / {len(days)} = {total // len(days)} {things} a day.")
    story.answer = total // len(days)


def theater(story: Story) -> None:
    """Tickets for two kinds of visitors."""
    place, money = story.of(PLACES), story.of(CURRENCIES)
    first, second = story.rng.sample(PEOPLE, 2)
    costs, counts = [story.up_to(30, 3), story.up_to(20)], [story.up_to(60), story.up_to(80)]
    story.tell(f"A ticket for the {place} costs {money}{costs[0]} for {first} and {money}{costs[1]} for {second}.")
    story.tell(f"[On one day|Today|Last Sunday] {counts[0]} {first} and {counts[1]} {second} [come|buy a ticket].")
    paid = [cost * count for cost, count in zip(costs, counts, strict=True)]
    story.solve(f"The {first} pay {counts[0]} * {money}{costs[0]} = {money}{paid[0]}.")
    story.solve(f"The {second} pay {counts[1]} * {money}{costs[1]} = {money}{paid[1]}.")
    if story.rng.random() < 0.6:
        story.tell(f"How much money does the {place} [take in|earn|get] [in total|altogether]?")
        story.solve(f"The {place} gets {money}{paid[0]} + {money}{paid[1]} = {money}{sum(paid)}.")
        story.answer = sum(paid)
    else:
        story.tell("[What is the difference between the two groups|How much more does one group pay than the other]?")
        story.solve(f"The difference is {money}{max(paid)} - {money}{min(paid)} = {money}{max(paid) - min(paid)}.")
        story.answer = max(paid) - min(paid)


def reading(story: Story) -> None:
    """Pages read day by day, and how many days or pages remain."""
    (name,), noun = story.names(1), story.of(("book", "novel", "report", "letter collection", "diary"))
    daily, days, after = story.up_to(40, 5), story.up_to(9), story.up_to(9)
    pages = daily * (days + after)
    story.tell(f"{name} [reads|is reading] a {noun} of {pages} pages, {daily} pages [every|a|each] day.")
    story.tell(f"[After {days} days|{days} days later], how many more days does {name} need to [finish|end] it?")
    story.solve(f"In {days} days {name} reads {daily} * {days} = {daily * days} pages.")
    story.solve(f"[There remain|That leaves] {pages} - {daily * days} = {pages - daily * days} pages.")
    story.solve(f"{name} needs {pages - daily * days} / {daily} = {after} more days.")
    story.answer = after


def tank(story: Story) -> None:
    """Filling and leaking."""
    noun, unit = story.of(("tank", "pool", "bucket", "barrel", "pond")), story.of(("liters", "gallons"))
    rate, leak, hours = story.up_to(40, 8), story.up_to(7), story.up_to(12)
    gain, period = rate - leak, story.of(("hour", "minute"))
    story.tell(f"[Water runs into|A hose fills|A pump fills] a {noun} with {rate} {unit} [per|an|every] {period}.")
    story.tell(f"{leak} {unit} [leak out|are lost|run out] [every|each] {period}.")
    story.solve(f"[Each {period}|Every {period}] the {noun} gains {rate} - {leak} = {gain} {unit}.")
    if story.rng.random() < 0.5:
        story.tell(f"How many {unit} are in the {noun} after {hours} {period}s?")
        story.solve(f"After {hours} {period}s it holds {gain} * {hours} = {gain * hours} {unit}.")
        story.answer = gain * hours
    else:
        story.tell(f"The {noun} holds {gain * hours} {unit}. After how many {period}s is it full?")
        story.solve(f"[It is full after|That takes] {gain * hours} / {gain} = {hours} {period}s.")
        story.answer = hours


def fractions_of_things(story: Story) -> None:
    """A share is given away, then a share of the rest."""
    (name, friend), things = story.names(2), story.of(SMALL_THINGS)
    below, second = story.of((2, 3, 4, 5)), story.of((2, 3, 4))
    total = below * second * story.up_to(12)
    given = total // below
    rest = total - given
    again = rest // second if rest % second == 0 else 0
    story.tell(
        f"{name} [bakes|collects|has|owns] {total} {things} and [gives|sends|sells] 1/{below} of them to {friend}."
    )
    story.solve(f"{friend} gets {total} / {below} = {given} {things}.")
    story.solve(f"{name} [has|keeps] {total} - {given} = {rest} {things}.")
    if again:
        story.tell(f"[Then|Later] 1/{second} of the [rest|remaining {things}] [is lost|is thrown away|breaks].")
        story.solve(f"[Of these|Of the rest] {rest} / {second} = {again} {things} are gone.")
        story.solve(f"[So there are|That leaves] {rest} - {again} = {rest - again} {things}.")
    story.tell(f"How many {things} [are left|does {name} keep|does {name} still have]?")
    story.answer = rest - again


def decimal_comparison(story: Story) -> None:
    """One count is a decimal share of another, and what both make."""
    (first, second), things = story.names(2), story.of(SMALL_THINGS)
    share, base = story.of((0.5, 0.25, 1.5, 0.75, 0.2)), story.up_to(20) * 20
    part = int(base * share)
    verb = story.of(("caught", "planted", "painted", "sold", "carried", "wrapped", "cleaned"))
    story.tell(
        f"{first} {verb} {base} {things}, while {second} {verb} {share} times as many[ with one hand| before lunch|]."
    )
    story.tell(f"How many {things} [were {verb} by both|were {verb} in total]?")
    story.solve(f"{second} {verb} {base} * {share} = {part} {things}.")
    story.solve(f"[Together|In total] they {verb} {base} + {part} = {base + part} {things}.")
    story.answer = base + part


def two_workers(story: Story) -> None:
    """Two people at different speeds, for days."""
    (first, second), worker, things = story.names(2), story.of(WORKERS), story.of(SMALL_THINGS)
    rate, times, days = story.up_to(30, 3), story.up_to(5), story.up_to(10)
    story.tell(f"{first}, a {worker}, [finishes|makes|checks] {rate} {things} a day.")
    story.tell(
        f"{second} [is new and|has more practice and|] [works {times} times as fast|does {times} times as much]."
    )
    story.tell(f"[What do they make together|How many {things} do the two finish together] in {days} days?")
    story.solve(f"{second} [finishes|makes] {rate} * {times} = {rate * times} {things} a day.")
    both = rate * (times + 1)
    story.solve(f"Together they [finish|make] {rate} + {rate * times} = {both} {things} a day.")
    story.solve(f"In {days} days that is {both} * {days} = {both * days} {things}.")
    story.answer = both * days


def trip_cost(story: Story) -> None:
    """Fuel or fares of a trip."""
    (name,), vehicle, money = story.names(1), story.of(VEHICLES), story.of(CURRENCIES)
    per, count, price, fee = story.of((10, 20, 25, 30, 40)), story.up_to(12), story.up_to(9), story.up_to(25)
    story.tell(f"{name}'s {vehicle} [goes|drives|runs] {per} miles on one gallon of fuel, which costs {money}{price}.")
    story.tell(
        f"{name} [travels|drives] {per * count} miles and [pays|spends] {money}{fee} for [the bridge|parking|food]."
    )
    story.tell("[What does the trip cost|How much money is spent on the trip]?")
    story.solve(f"The trip takes {per * count} / {per} = {count} gallons.")
    story.solve(f"[The fuel costs|Fuel is] {count} * {money}{price} = {money}{count * price}.")
    story.solve(
        f"[In total|With the rest] that is {money}{count * price} + {money}{fee} = {money}{count * price + fee}."
    )
    story.answer = count * price + fee


def profit(story: Story) -> None:
    """Bought low, sold high."""
    (name,), item, money = story.names(1), story.of(GOODS), story.of(CURRENCIES)
    count, cost, gain = story.up_to(30), story.up_to(20), story.up_to(15)
    story.tell(
        f"{name} [buys|orders] {count} {plural(item)} for {money}{cost} each and sells each for {money}{cost + gain}."
    )
    story.tell(f"[How much profit does {name} make|What is {name}'s profit|How much does {name} earn]?")
    if story.rng.random() < 0.5:
        story.solve(
            f"[The profit on one|One brings a profit of] {money}{cost + gain} - {money}{cost} = {money}{gain}."
        )
        story.solve(f"[All of them bring|The profit is] {count} * {money}{gain} = {money}{count * gain}.")
    else:
        story.solve(f"{name} pays {count} * {money}{cost} = {money}{count * cost}.")
        story.solve(f"{name} gets {count} * {money}{cost + gain} = {money}{count * (cost + gain)}.")
        story.solve(f"The profit is {money}{count * (cost + gain)} - {money}{count * cost} = {money}{count * gain}.")
    story.answer = count * gain


def groups_of_people(story: Story) -> None:
    """Rows, tables, buses: how many are needed or how many remain."""
    people, place, noun = story.of(PEOPLE), story.of(PLACES), story.of(("tables", "rows", "rooms", "tents", "benches"))
    size, groups, extra = story.up_to(12), story.up_to(20), story.up_to(30)
    total = size * groups
    present = total - extra if total > extra else total
    story.tell(f"[{present} {people} come to the {place}|In the {place} there are {present} {people}].")
    if present < total:
        story.tell(f"[Then|An hour later] {extra} more [arrive|join them|come].")
        story.solve(f"[There are|That makes] {present} + {extra} = {total} {people}.")
    story.tell(f"[{size} of them fit in one of the {noun}|The {noun} are for {size} {people} each].")
    story.tell(f"How many {noun} [are needed|do they need|will be used]?")
    story.solve(f"[They need|That takes] {total} / {size} = {groups} {noun}.")
    story.answer = groups


def bill_shared(story: Story) -> None:
    """A bill with a tip, shared."""
    names, money = story.names(story.up_to(5)), story.of(CURRENCIES)
    each, percent = story.up_to(20) * 10, story.of((10, 20, 50))
    bill = each * len(names)
    tip = bill * percent // 100
    per_head = (bill + tip) / len(names)
    who = ", ".join(names[:-1]) + f" and {names[-1]}"
    story.tell(
        f"{who} [eat out|have dinner|rent a boat]. The bill is {money}{bill} and they [add|leave] a tip of {percent}%."
    )
    story.tell(
        "[They share the cost evenly|Everyone pays the same]. How much does [each one|each of them|one of them] pay?"
    )
    story.solve(f"The tip is {money}{bill} * {percent}% = {money}{tip}.")
    story.solve(f"[In total|Together] they pay {money}{bill} + {money}{tip} = {money}{bill + tip}.")
    story.solve(f"Each [one|of them] pays {money}{bill + tip} / {len(names)} = {money}{number(per_head)}.")
    story.answer = per_head
