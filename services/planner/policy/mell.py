"""MELL's packing of requests onto instances (figure 10 of the paper), as printed and in a repaired version.

Instances are bins of equal capacity, and requests are items of growing size. An item is large (more than half of a
bin), medium (more than a third), small (more than a quarter) or tiny; a bin's kind is that of its largest item.
Requests of at most an eighth of a bin share bags of an eighth to a quarter, which the paper requires in one sentence.
Bins are opened when needed and closed when empty.

The printed algorithm violates theorem 1: tiny requests that arrived before large ones are never moved to them, so that
property 5 is violated without bound. It also has no rule for an item that outgrows its bin within its class.
`Book(repaired=True)` ends each operation with moves that restore the properties, within the limit of ten moves. Both
versions have the missing rule.

Sizes are whole numbers (bytes or tokens), so sums are exact. No clock, no I/O.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from ballast.common.errors import InvariantViolation

MOST_MOVES = 10  # maximum items moved per operation: theorem 3
_FULL = 0.75  # fraction of a bin that properties 3 and 5 require

Key = Hashable  # identifies a request


class MellSize(IntEnum):
    TINY = 0
    SMALL = 1
    MEDIUM = 2
    LARGE = 3


_WHOLE = {MellSize.MEDIUM: 2, MellSize.SMALL: 3}  # items of a bin's kind in a complete bin: properties 1 and 2


def size_of(amount: int, capacity: int) -> MellSize:
    if 2 * amount > capacity:
        return MellSize.LARGE
    if 3 * amount > capacity:
        return MellSize.MEDIUM
    return MellSize.SMALL if 4 * amount > capacity else MellSize.TINY


@dataclass(slots=True, eq=False)
class Item:
    """One request, or a bag of several."""

    requests: dict[Key, int]
    is_bag: bool
    bin: "MellBin | None" = None
    amount: int = field(init=False)

    def __post_init__(self) -> None:
        self.amount = sum(self.requests.values())

    def set(self, request: Key, amount: int) -> None:
        self.amount += amount - self.requests.get(request, 0)
        self.requests[request] = amount

    def remove(self, request: Key) -> None:
        self.amount -= self.requests.pop(request)


@dataclass(slots=True, eq=False)
class MellBin:
    number: int  # number in order of opening
    items: list[Item] = field(default_factory=list[Item])

    @property
    def used(self) -> int:
        return sum([item.amount for item in self.items])


@dataclass(frozen=True, slots=True)
class MellMove:
    request: Key
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Exceptions:
    """Numbers of bins that violate a property of theorem 1, which permits a constant number of each."""

    medium: int  # property 1: a medium bin has two medium items
    small: int  # property 2: a small one has three small ones
    tiny: int  # property 3: a tiny one is three quarters full
    alone: int  # property 4: a large item shares its bin with a medium or small one, if any of them fits
    hollow: int  # property 5: while there are tiny bins, large and medium ones are three quarters full


class Book:
    """The assignment of requests to bins. `take_moves` returns moves of one or several operations, merged."""

    def __init__(self, capacity: int, *, repaired: bool) -> None:
        self.capacity = capacity
        self.bins: list[MellBin] = []  # in order of opening
        self._repaired = repaired
        self._items: dict[Key, Item] = {}
        self._open_bag: Item | None = None
        self._opened_count = 0
        self._came_from: dict[Key, int] = {}  # request moved since `take_moves` -> its previous bin
        self._moved: set[Item] = set()  # items moved by this operation

    # ------------------------------------------------------------ operations

    def allocate(self, request: Key, amount: int) -> None:
        """Add a request."""
        self._begin()
        self._enter(request, amount)
        self._end()
        self._came_from.pop(request, None)  # its current bin counts as its first

    def depart(self, request: Key) -> None:
        """Remove a request."""
        self._begin()
        item = self._items.pop(request)
        self._came_from.pop(request, None)
        here, size, was = self._bin_of(item), self._size(item), self._kind(self._bin_of(item))
        item.remove(request)
        if item.requests:
            self._keep_bag(item)
        else:
            self._lift(item)
            if self._open_bag is item:
                self._open_bag = None
            if here is not self.bins[-1]:
                self._refill(here, size, was)
        self._end()

    def update(self, request: Key, amount: int) -> None:
        """Change a request's size."""
        item = self._items[request]
        here, before = self._bin_of(item), self._size(item)
        item.set(request, amount)
        self._begin()
        same = not self._is_outgrown(item) if item.is_bag else self._size(item) is before
        if same and here.used <= self.capacity:
            return
        if item.is_bag:
            self._split(item)
        elif self._size(item) != before and (before < MellSize.MEDIUM or self._has_other(here, item, MellSize.LARGE)):
            self._lift(item)
            self._refill(here, before, max(before, self._kind(here)))
            self._place(item, here)
        if here.items and here.used > self.capacity:
            self._relieve(here, item if item.bin is here else None)
        self._end()

    def take_moves(self) -> list[MellMove]:
        """Return the moves of requests whose bin has changed since the last call, and forget them."""
        moves = [
            MellMove(request, source, here.number)
            for request, source in self._came_from.items()
            if (here := self._bin_of(self._items[request])).number != source
        ]
        self._came_from.clear()
        return moves

    @property
    def moved_count(self) -> int:
        """Number of items that the last operation moved."""
        return len(self._moved)

    def bin_number(self, request: Key) -> int:
        return self._bin_of(self._items[request]).number

    # ------------------------------------------------------------ queries

    def _size(self, item: Item) -> MellSize:
        return size_of(item.amount, self.capacity)

    def _kind(self, one: MellBin) -> MellSize:
        return max([self._size(item) for item in one.items], default=MellSize.TINY)

    def _of_kind(self, *kinds: MellSize) -> list[MellBin]:
        return [one for one in self.bins if one.items and self._kind(one) in kinds]

    def _latest(self, *kinds: MellSize, but: MellBin | None = None) -> MellBin | None:
        return next((one for one in reversed(self._of_kind(*kinds)) if one is not but), None)

    def _by_priority(self, *kinds: MellSize) -> list[MellBin]:
        """Return the bins of these kinds, ordered by fewer items, then by more room."""
        return sorted(self._of_kind(*kinds), key=lambda one: (len(one.items), one.used, one.number))

    def _room(self, one: MellBin) -> int:
        return self.capacity - one.used

    def _firm(self, one: MellBin) -> int:
        """Return the size of the items that are not tiny, because tiny ones can be moved."""
        return sum([item.amount for item in one.items if self._size(item) > MellSize.TINY])

    def _count(self, one: MellBin, size: MellSize) -> int:
        return sum([self._size(item) is size for item in one.items])

    def _company(self, one: MellBin) -> int:
        """Return the number of medium and small items of a bin."""
        return self._count(one, MellSize.MEDIUM) + self._count(one, MellSize.SMALL)

    def _has_other(self, one: MellBin, item: Item, size: MellSize) -> bool:
        return any(other is not item and self._size(other) is size for other in one.items)

    @staticmethod
    def _bin_of(item: Item) -> MellBin:
        assert item.bin is not None, "of an item in the book"
        return item.bin

    # ------------------------------------------------------------ changes

    def _begin(self) -> None:
        self._moved.clear()

    def _end(self) -> None:
        if self._repaired:
            self._repair()
        self.bins = [one for one in self.bins if one.items]

    def _open(self) -> MellBin:
        one = MellBin(self._opened_count)
        self._opened_count += 1
        self.bins.append(one)
        return one

    def _lift(self, item: Item) -> None:
        """Take an item out of its bin, and remember the bin for the move."""
        here = self._bin_of(item)
        here.items.remove(item)
        for request in item.requests:
            self._came_from.setdefault(request, here.number)

    def _put(self, item: Item, target: MellBin) -> None:
        if item.bin is not None and item.bin is not target:
            self._moved.add(item)
        if item.bin is not None and item in item.bin.items:
            self._lift(item)
        target.items.append(item)
        item.bin = target

    def _enter(self, request: Key, amount: int, source: MellBin | None = None) -> None:
        """Put a request into the open bag, or into a bin of its class. `source`: its previous bin."""
        if 8 * amount > self.capacity:
            item = self._items[request] = Item({request: amount}, False, source)
            self._place(item, source)
            return
        bag = self._open_bag
        if bag is not None and self._fits_bag(bag, amount):
            bag.set(request, amount)
            self._items[request] = bag
            if source is not None and source is not bag.bin:
                self._moved.add(bag)
            return
        self._open_bag = item = self._items[request] = Item({request: amount}, True, source)
        self._place(item, source)

    def _fits_bag(self, bag: Item, amount: int) -> bool:
        return 4 * (bag.amount + amount) <= self.capacity and self._room(self._bin_of(bag)) >= amount

    def _keep_bag(self, bag: Item) -> None:
        """Merge a bag of at most an eighth of a bin into the open bag, or make it the open one if there is none."""
        if bag is self._open_bag or 8 * bag.amount > self.capacity:
            return
        if self._open_bag is None or not self._fits_bag(self._open_bag, bag.amount):
            if self._open_bag is None:
                self._open_bag = bag
            return
        here, target = self._bin_of(bag), self._open_bag
        self._lift(bag)
        for request, amount in bag.requests.items():
            target.set(request, amount)
            self._items[request] = target
        self._moved.add(target)
        self._refill(here, MellSize.TINY, max(MellSize.TINY, self._kind(here)))

    def _is_outgrown(self, bag: Item) -> bool:
        return 4 * bag.amount > self.capacity or 8 * max(bag.requests.values()) > self.capacity

    def _split(self, bag: Item) -> None:
        """Take the largest request out of a bag that exceeds a quarter of a bin, or that has a request above an
        eighth.
        """
        if not self._is_outgrown(bag):
            return
        largest = max(bag.requests, key=bag.requests.__getitem__)
        amount, here = bag.requests[largest], self._bin_of(bag)
        if len(bag.requests) == 1:  # a bag of one request is that request
            bag.is_bag = False
            if self._open_bag is bag:
                self._open_bag = None
            return
        bag.remove(largest)
        self._came_from.setdefault(largest, here.number)
        if self._open_bag is bag:
            self._open_bag = None
        self._enter(largest, amount, here)
        self._keep_bag(bag)

    def _place(self, item: Item, source: MellBin | None = None) -> None:
        size, amount = self._size(item), item.amount
        if size is MellSize.TINY:
            kinds = (MellSize.LARGE, MellSize.MEDIUM)  # a medium bin may have one in addition to its two: property 1
            beside = next((b for k in kinds for b in self._by_priority(k) if self._room(b) >= amount), None)
            latest = self._latest(MellSize.TINY)
            if beside is None and latest is not None and self._room(latest) >= amount:
                beside = latest
            self._put(item, beside or self._open())
            return
        if size is MellSize.LARGE:
            here = self._open()
            self._put(item, here)
            self._accompany(here)
            return
        for one in self._by_priority(MellSize.LARGE):
            if self._firm(one) + amount <= self.capacity and not self._company(one):
                self._put(item, one)
                self._move_tiny_out(one)
                return
        latest = self._latest(size)
        if (
            latest is not None
            and self._count(latest, size) < _WHOLE[size]
            and self._firm(latest) + amount <= self.capacity
        ):
            self._put(item, latest)
            self._move_tiny_out(latest)
            return
        self._put(item, self._open())

    def _move_tiny_out(self, one: MellBin) -> None:
        """Move tiny items out until the bin is not overfull."""
        while one.used > self.capacity:
            tiny = min(
                [item for item in one.items if self._size(item) is MellSize.TINY],
                key=lambda item: item.amount,
                default=None,
            )
            if tiny is None:
                return
            self._lift(tiny)
            self._place(tiny, one)

    def _accompany(self, one: MellBin) -> None:
        """Put a medium or small item into a large bin that has none. It is taken from the first bin by priority, which
        is refilled.
        """
        if self._company(one):
            return
        for other in self._by_priority(MellSize.MEDIUM, MellSize.SMALL):
            found = self._largest(other, self._room(one), (MellSize.MEDIUM, MellSize.SMALL))
            if found is not None:
                size = self._size(found)
                self._put(found, one)
                self._refill_with(other, size)
                return

    def _largest(self, one: MellBin, room: int, sizes: tuple[MellSize, ...]) -> Item | None:
        """Return the largest item of these sizes in a bin that fits into `room`."""
        found = [item for item in one.items if self._size(item) in sizes and item.amount <= room]
        return max(found, key=lambda item: item.amount, default=None)

    def _refill_with(self, one: MellBin, size: MellSize) -> None:
        """Move the largest item of `size` that fits into `one`, taken from the most recently opened bin of that size
        class.
        """
        latest = self._latest(size, but=one)
        if not one.items or latest is None or latest.number < one.number:
            return
        found = self._largest(latest, self.capacity - self._firm(one), (size,))
        if found is not None:
            self._put(found, one)
            self._move_tiny_out(one)

    def _refill(self, one: MellBin, size: MellSize, kind: MellSize) -> None:
        """Refill a bin of this kind after an item of this size has left."""
        if not one.items:
            return
        if size is MellSize.LARGE:
            self._place_anew(list(one.items), one)
        elif size is MellSize.TINY:
            kinds = (MellSize.TINY, MellSize.MEDIUM) if kind is MellSize.TINY else (MellSize.TINY,)
            latest = self._latest(*kinds, but=one)
            if latest is not None and (kind is not MellSize.TINY or latest.number > one.number):
                found = self._largest(latest, self._room(one), (MellSize.TINY,))
                if found is not None:
                    self._put(found, one)
        elif kind is MellSize.LARGE:
            self._accompany(one)
        else:
            self._refill_with(one, size)
            if self._kind(one) is MellSize.TINY:
                self._place_anew(list(one.items), one)

    def _place_anew(self, items: Iterable[Item], source: MellBin) -> None:
        found = sorted(items, key=lambda item: -item.amount)
        for item in found:
            self._lift(item)
        for item in found:
            self._place(item, source)

    def _relieve(self, one: MellBin, grown: Item | None) -> None:
        """Move the smallest items out of an overfull bin."""
        while one.used > self.capacity:
            others = [item for item in one.items if item is not grown]
            if not others:
                raise InvariantViolation(f"a request of {one.used} is larger than an instance of {self.capacity}")
            least = min(others, key=lambda item: item.amount)
            self._lift(least)
            self._place(least, one)
        if self._kind(one) is MellSize.LARGE:
            self._accompany(one)

    # ------------------------------------------------------------ repair

    def _repair(self) -> None:
        """Restore properties by single moves, up to the operation's limit."""
        rules: tuple[Callable[[], bool], ...] = (self._pair_up, self._join, self._fill_hollow, self._fill_tiny)
        while len(self._moved) < MOST_MOVES - 2 and any(rule() for rule in rules):  # a rule moves up to three
            self.bins = [one for one in self.bins if one.items]

    def _join(self) -> bool:
        """Move an item from the last to the first of several incomplete bins: properties 1 and 2. Returns True if one
        moved.
        """
        for size, whole in _WHOLE.items():
            short = [one for one in self._of_kind(size) if self._count(one, size) < whole]
            if len(short) < 2:
                continue
            first, last = short[0], short[-1]
            found = self._largest(last, self.capacity - self._firm(first), (size,))
            if found is not None:
                self._put(found, first)
                self._move_tiny_out(first)
                return True
        return False

    def _pair_up(self) -> bool:
        """Move a medium or small item into a large bin that has none: property 4. Returns True if one moved."""
        for one in self._of_kind(MellSize.LARGE):
            if self._company(one):
                continue
            for other in reversed(self._of_kind(MellSize.MEDIUM, MellSize.SMALL)):
                found = self._largest(other, self.capacity - self._firm(one), (MellSize.MEDIUM, MellSize.SMALL))
                if found is not None:
                    self._put(found, one)
                    self._move_tiny_out(one)
                    return True
        return False

    def _fill_hollow(self) -> bool:
        """Move a tiny item into a large or medium bin that is not full: property 5. Returns True if one moved."""
        latest = self._latest(MellSize.TINY)
        if latest is None:
            return False
        for one in self._of_kind(MellSize.LARGE, MellSize.MEDIUM):
            if one.used < _FULL * self.capacity:
                found = self._largest(latest, self._room(one), (MellSize.TINY,))
                if found is not None:
                    self._put(found, one)
                    return True
        return False

    def _fill_tiny(self) -> bool:
        """Move a tiny item from the last to the first of several tiny bins that are not full: property 3. Returns True
        if one moved.
        """
        short = [one for one in self._of_kind(MellSize.TINY) if one.used < _FULL * self.capacity]
        if len(short) < 2:
            return False
        found = self._largest(short[-1], self._room(short[0]), (MellSize.TINY,))
        if found is not None:
            self._put(found, short[0])
        return found is not None

    # ------------------------------------------------------------ theorem 1

    def check(self) -> Exceptions:
        """Return the numbers of bins that violate each property.

        Raises:
            InvariantViolation: a bin is overfull or empty, or a request is in no bin or in two.
        """
        held = [request for one in self.bins for item in one.items for request in item.requests]
        if sorted(map(str, held)) != sorted(map(str, self._items)):
            raise InvariantViolation("bins and the list of requests disagree")
        for one in self.bins:
            if one.used > self.capacity or not one.items or any(item.bin is not one for item in one.items):
                raise InvariantViolation(
                    f"bin {one.number} holds {one.used} of {self.capacity} in {len(one.items)} items"
                )
        tiny = self._of_kind(MellSize.TINY)
        loose = [
            item.amount
            for one in self._of_kind(MellSize.MEDIUM, MellSize.SMALL)
            for item in one.items
            if self._size(item) > MellSize.TINY
        ]
        alone = [
            one
            for one in self._of_kind(MellSize.LARGE)
            if not self._company(one) and any(self._firm(one) + amount <= self.capacity for amount in loose)
        ]
        hollow = [one for one in self._of_kind(MellSize.LARGE, MellSize.MEDIUM) if one.used < _FULL * self.capacity]
        return Exceptions(
            medium=sum(self._count(one, MellSize.MEDIUM) < 2 for one in self._of_kind(MellSize.MEDIUM)),
            small=sum(self._count(one, MellSize.SMALL) < 3 for one in self._of_kind(MellSize.SMALL)),
            tiny=sum(one.used < _FULL * self.capacity for one in tiny),
            alone=len(alone),
            hollow=len(hollow) if tiny else 0,
        )


def sends_kv(tokens: int, kv_bytes_per_token: float, link_bytes_per_s: float, token_s: float) -> bool:
    """True if moving a request's KV is faster than recomputing its tokens.

    Args:
        link_bytes_per_s: Available bandwidth between the two instances.
        token_s: Prefill time per token of the target in a full batch.
    """
    return tokens * kv_bytes_per_token / link_bytes_per_s <= tokens * token_s
