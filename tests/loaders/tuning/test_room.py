"""Loaders that are read in turn have their workers in turn."""

from dataclasses import dataclass

from lightning_ncclsafe.loaders.tuning.room import Room


@dataclass(eq=False)
class Loader:
    group: str
    alive: int = 0
    parked: int = 0

    def park(self) -> None:
        self.alive, self.parked = 0, self.parked + 1


def room_of(most: int, *loaders: Loader) -> Room:
    room = Room(most)
    for loader in loaders:
        room.add(loader)
    return room


def test_who_is_read_next_gets_the_workers_of_who_is_not() -> None:
    train, validate = Loader("train", alive=3), Loader("validate")
    room = room_of(4, train, validate)
    room.make(validate, 2)
    assert (train.alive, train.parked) == (0, 1)


def test_nobody_gives_way_where_all_fit() -> None:
    train, validate = Loader("train", alive=2), Loader("validate")
    room_of(4, train, validate).make(validate, 2)
    assert train.parked == 0


def test_loaders_that_are_read_at_the_same_time_keep_theirs() -> None:
    one, other, validate = Loader("train", alive=2), Loader("train"), Loader("validate", alive=1)
    room_of(3, one, other, validate).make(other, 1)
    assert (one.parked, validate.parked) == (0, 1)


def test_those_give_way_first_that_were_read_the_longest_ago() -> None:
    first, second, third = Loader("a", alive=1), Loader("b", alive=1), Loader("c")
    room = room_of(2, second, first, third)
    room.make(first, 1), room.make(second, 1)
    room.make(third, 1)
    assert (first.parked, second.parked) == (1, 0)


def test_who_has_gone_is_not_asked() -> None:
    gone, stays = Loader("a", alive=5), Loader("b")
    room = room_of(2, gone, stays)
    room.remove(gone)
    room.make(stays, 2)
    assert gone.parked == 0
