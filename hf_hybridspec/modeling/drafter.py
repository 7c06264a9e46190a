"""What every drafter is: the records it exchanges with the loop, and the base class of the three families.

A drafter never imports the loop and never sees a live target: it borrows the target's embedding and head when it is
bound (`Drafter.bind`), reads taps when tokens are committed (`observe`), and proposes a block after an anchor
(`propose`). All per-sequence state is in a `DraftContext`, so that one drafter object serves any number of caches.
"""
