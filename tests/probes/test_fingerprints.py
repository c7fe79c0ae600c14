"""Fingerprints: equal for equal data in every process, different for different data, and nothing is changed."""

import datetime
import itertools
import os
import random
import subprocess
import sys
import time
import tracemalloc
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import calls_in
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from lightning_ncclsafe.probes.data import fingerprints as module
from lightning_ncclsafe.probes.data import plain_values
from lightning_ncclsafe.probes.data.fingerprints import digest_of_batch, fingerprints
from lightning_ncclsafe.probes.data.plain_values import SAMPLED, WHOLE, positions
from lightning_ncclsafe.probes.data.random_state import random_states, random_states_kept, seed_all


@pytest.fixture(autouse=True)
def _draws_nothing() -> Iterator[None]:
    """No test may find a global generator changed."""
    with random_states_kept():
        np.random.randn()
        before = random_states()
        yield
        assert random_states() == before


class Items(Dataset[Any]):
    """Gives what a function gives."""

    def __init__(self, item: Callable[[int], Any], length: int = 20, **stored: Any) -> None:
        self.item = item
        self.length = length
        vars(self).update(stored)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


class Forbidden(IterableDataset[Any]):
    def __init__(self, **stored: Any) -> None:
        vars(self).update(stored)

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was iterated")


def never(index: int) -> Any:
    raise AssertionError("it was indexed")


def found(dataset: Any, content: str = "sample", **options: Any) -> dict[str, str]:
    made = fingerprints(dataset, content=content, **options)
    assert made.problems == ()
    return made.found


def holding(**stored: Any) -> Items:
    return Items(never, **stored)


class TestPositions:
    @pytest.mark.parametrize("length", [0, 1, 2, 3, 8, 9, 1_000, 10**6, 2**62])
    @pytest.mark.parametrize("most", [2, 3, 8, 1_024])
    def test_positions_are_in_range_and_include_the_ends(self, length: int, most: int) -> None:
        chosen = positions(length, most)
        assert chosen == positions(length, most)
        assert len(chosen) == len(set(chosen)) <= most
        assert all(0 <= position < length for position in chosen)
        assert length <= most or chosen[:2] == [0, length - 1]

    def test_no_large_gap_is_left(self) -> None:
        chosen = sorted(positions(10**6, SAMPLED))
        assert max(after - before for before, after in itertools.pairwise(chosen)) <= 2 * 10**6 / SAMPLED + 1
        # An even spread alone would see every other one of a pattern.
        assert {position % 4 for position in chosen} == {0, 1, 2, 3}


class TestIndices:
    @pytest.mark.parametrize(
        "make", [list, tuple, np.array, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)]
    )
    @pytest.mark.parametrize("content", ["sample", "full"])
    @pytest.mark.parametrize("length", [10, WHOLE + 1])
    def test_the_container_type_does_not_matter(self, make: Callable[[Any], Any], content: str, length: int) -> None:
        base = holding()
        expected = found(Subset(base, range(length)), content, items=False)
        assert set(expected) == {"indices"}
        assert found(Subset(base, make(list(range(length)))), content, items=False) == expected

    @pytest.mark.parametrize("other", [[1, 2], [1, 3, 2], [1, 2, 4], [], [1, 2, 3, 3]])
    def test_other_indices_differ(self, other: list[int]) -> None:
        assert found(Subset(holding(), [1, 2, 3])) != found(Subset(holding(), other))

    def test_a_sample_detects_another_split(self) -> None:
        drawn = [torch.randperm(200_000, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (1, 2)]
        assert found(Subset(holding(), drawn[0])) != found(Subset(holding(), drawn[1]))

    def test_full_content_detects_a_single_different_index(self) -> None:
        # Neither an end nor in the sample.
        place = next(place for place in range(WHOLE + 1) if place not in positions(WHOLE + 1, SAMPLED))
        one, other = list(range(WHOLE + 1)), list(range(WHOLE + 1))
        other[place] = 0
        assert found(Subset(holding(), one)) == found(Subset(holding(), other))
        assert found(Subset(holding(), one), "full", items=False) != found(
            Subset(holding(), other), "full", items=False
        )

    def test_indices_of_every_level_count(self) -> None:
        nested = [
            Subset(Subset(holding(), inner), outer) for inner, outer in (([5, 6], [0]), ([5, 7], [0]), ([5, 6], [1]))
        ]
        assert len({found(dataset)["indices"] for dataset in nested}) == 3

    @pytest.mark.parametrize("strange", [["a"], [1.5], [2**70], {1, 2}, iter([1]), None, torch.zeros(2, 2), object()])
    def test_a_non_list_of_numbers_has_no_fingerprint(self, strange: Any) -> None:
        assert found(Subset(holding(), strange)) == {}

    def test_a_sample_of_many_indices_makes_no_copy_of_all(self) -> None:
        dataset = Subset(holding(), list(range(1_000_000)))
        tracemalloc.start()
        try:
            found(dataset)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1_000_000, "less than a byte for each"


class TestFiles:
    @pytest.mark.parametrize("name", ["samples", "imgs", "files", "urls", "paths", "filenames", "image_files"])
    def test_file_names_count_and_their_folders_do_not(self, name: str) -> None:
        here, there, other = (
            [f"{root}/cat/{n}.png" for n in names] for root, names in (("/a/b", "12"), ("/c", "12"), ("/a/b", "13"))
        )
        prints = found(holding(**{name: here}))
        assert set(prints) == {"files", "paths"}
        assert prints == found(holding(**{name: list(map(Path, here))})) == found(holding(**{name: np.array(here)}))
        elsewhere = found(holding(**{name: there}))
        assert prints["files"] == elsewhere["files"] and prints["paths"] != elsewhere["paths"]
        for names in (other, here[::-1]):
            assert not set(prints.values()) & set(found(holding(**{name: names})).values())

    def test_the_label_of_a_file_counts(self) -> None:
        assert found(holding(samples=[("a/1.png", 0)])) != found(holding(samples=[("a/1.png", 1)]))

    @pytest.mark.parametrize(
        "folders", [("/tmp/tmpab12", "/tmp/tmpcd34"), ("/local/node3", "/local/node4"), ("a", "b")]
    )
    def test_a_rank_specific_folder_does_not_count(self, folders: tuple[str, str]) -> None:
        one, other = (found(holding(files=[f"{folder}/shard0.npy"])) for folder in folders)
        assert one["files"] == other["files"]
        assert "paths" not in one or one["paths"] != other["paths"]

    def test_the_folder_of_a_paired_file_does_not_count(self) -> None:
        one, elsewhere, other = (
            found(holding(samples=[(f"/{root}/1.png", f"/{root}/mask_{n}.png")]))["files"]
            for root, n in (("a", 1), ("b", 1), ("a", 2))
        )
        assert one == elsewhere != other

    @pytest.mark.parametrize("names", [["part.npy"], ["a/b.png", "/c/d.png"]], ids=str)
    def test_relative_paths_have_no_path_fingerprint(self, names: list[str]) -> None:
        assert set(found(holding(files=names))) == {"files"}

    @pytest.mark.parametrize("strange", [None, 5, [None], ["a", "b", 0][:0], [1, "a"]], ids=str)
    def test_a_list_with_a_non_file_has_no_fingerprint(self, strange: Any) -> None:
        assert found(holding(files=["a/b.png", strange])) == {}

    def test_a_key_in_a_url_does_not_count(self) -> None:
        assert found(Forbidden(urls="s3://b/d/{0..9}.tar?key=1")) == found(Forbidden(urls="s3://b/d/{0..9}.tar?key=2"))

    @pytest.mark.parametrize("strange", [[], [1, 2], [torch.zeros(2)], {"a": 1}, None, 5, [[]], [("a", object())][:0]])
    def test_a_non_list_of_files_has_no_fingerprint(self, strange: Any) -> None:
        assert found(holding(samples=strange)) == {}

    def test_properties_are_not_evaluated(self) -> None:
        class Lists(Items):
            @property
            def samples(self) -> list[str]:
                raise AssertionError("it was run")

            def __getattr__(self, name: str) -> Any:
                raise AssertionError(f"{name} was asked for")

        assert found(Lists(never)) == {}

    def test_a_list_in_a_slot_is_read(self) -> None:
        class Slotted:
            __slots__ = ("files", "paths")

        dataset = Slotted()
        assert found(dataset) == {}
        dataset.files = ["a"]
        assert set(found(dataset)) == {"files"}

    def test_many_entries_are_sampled(self) -> None:
        many = [f"{n}.png" for n in range(WHOLE + 1)]
        assert found(holding(files=many)) != found(holding(files=[*many[:-1], "other"]))


PAIRS: list[tuple[Any, Any]] = [
    ([1, 2], [1, 3]),
    ([1, 2], [1.0, 2]),
    ([True], [1]),
    ([None], [0]),
    (["ab", "c"], ["a", "bc"]),
    ([b"a"], ["a"]),
    ([bytearray(b"a")], [bytearray(b"b")]),
    ([{"x": 1, "y": 2}], [{"x": 2, "y": 1}]),
    ([(1, [2, 3])], [(1, [2], 3)]),
    (range(5), range(6)),
    (np.arange(5), np.arange(1, 6)),
    (np.arange(5), np.arange(5.0)),
    ([np.float32(1)], [np.float32(2)]),
    ([datetime.datetime(2020, 1, 1)], [datetime.datetime(2020, 1, 2)]),
    (torch.zeros(4, 2), torch.zeros(2, 4)),
    (torch.zeros(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    (torch.zeros(()), torch.ones(())),
    (torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)),
    ([torch.tensor([1j]).conj()], [torch.tensor([1j])]),
    (torch.zeros(0, 3), torch.zeros(0, 4)),
    (TensorDataset(torch.zeros(4)), TensorDataset(torch.ones(4))),
    (TensorDataset(torch.zeros(4), torch.zeros(4)), TensorDataset(torch.zeros(4), torch.ones(4))),
    (
        TensorDataset(torch.zeros(2_000, 700)),
        TensorDataset(torch.zeros(2_000, 700).index_fill(0, torch.tensor(1_999), 1)),
    ),
    (Subset(TensorDataset(torch.zeros(4)), [1]), Subset(TensorDataset(torch.ones(4)), [1])),
    (
        ConcatDataset([TensorDataset(torch.zeros(4)), TensorDataset(torch.ones(4))]),
        ConcatDataset([TensorDataset(torch.ones(4)), TensorDataset(torch.zeros(4))]),
    ),
    ([namedtuple("P", "x")(1)], [namedtuple("P", "x")(2)]),
]


COUNTERS: list[Any] = [
    range(6),
    [0, 1, 2],
    (3, 1),
    [],
    torch.arange(6),
    torch.arange(6, dtype=torch.uint8),
    np.arange(6),
    [torch.tensor(1), np.int64(2)],
    [{"step": 0}, {"step": 1}],
    TensorDataset(torch.arange(6)),
]
CONTENTS: list[Any] = [
    [0.0, 1.0],
    [[1, 2], [3]],
    [torch.arange(3)],
    [{"ids": [1, 2]}],
    ["0", "1"],
    [b"0"],
    torch.arange(6.0),
    torch.arange(6).reshape(2, 3),
    np.arange(6).reshape(6, 1),
    np.array(["a"]),
    TensorDataset(torch.arange(6), torch.arange(6)),
]


class TestValues:
    @pytest.mark.parametrize(("one", "other"), PAIRS)
    @pytest.mark.parametrize("content", ["sample", "full"])
    def test_other_values_differ(self, one: Any, other: Any, content: str) -> None:
        told = found(one, content, items=False)
        assert told == found(one, content, items=False)
        others = found(other, content, items=False)
        assert [told.get(kind) for kind in ("values", "counts")] != [others.get(kind) for kind in ("values", "counts")]

    @pytest.mark.parametrize("made", COUNTERS)
    def test_possible_counters_are_kept_separate(self, made: Any) -> None:
        assert set(found(made)) == {"counts"}

    @pytest.mark.parametrize("made", CONTENTS)
    def test_more_than_a_counter_is_data(self, made: Any) -> None:
        assert set(found(made)) == {"values"}

    def test_a_counter_beside_data_has_its_own_fingerprint(self) -> None:
        assert set(found(ConcatDataset([range(3), TensorDataset(torch.zeros(2))]))) == {"counts", "values"}

    @pytest.mark.parametrize(
        "make",
        [
            lambda path: [path],
            lambda path: [Path(path)],
            lambda path: [{"image": path, "x": 1.5}],
            lambda path: [{"path": path.lstrip("/")}],
            lambda path: np.array([path]),
            lambda path: [np.str_(path)],
        ],
        ids=["text", "path", "record", "relative path", "array", "array's text"],
    )
    def test_only_the_last_part_of_a_path_counts(self, make: Callable[[str], Any]) -> None:
        one, elsewhere, other = (
            found(make(path)) for path in ("/a/rank0/i.pt", "/local/node-17/i.pt", "/a/rank0/j.pt")
        )
        assert set(one) == {"names"}
        assert one == elsewhere != other

    @pytest.mark.parametrize("text", ["/", "/imagine a cat", "and/or", "/a\n/b", "/a" * 5_000, "rank0/a.png"], ids=len)
    def test_other_text_with_a_slash_is_text(self, text: str) -> None:
        assert set(found([text])) == {"values"}
        assert found([text]) != found([f"x{text}"])

    def test_equal_content_is_equal(self) -> None:
        strided = torch.arange(12).reshape(3, 4)
        assert found(strided.T) == found(strided.T.contiguous())
        assert found([strided.T[1]]) == found([strided.T[1].contiguous()]) != {}
        assert found(strided.float().requires_grad_()) == found(strided.float())
        assert found([{"x": 1, "y": 2}]) == found([{"y": 2, "x": 1}])
        assert found(["/here/d/1.png"]) == found(["/there/d/1.png"])

    @pytest.mark.parametrize(
        "strange",
        [
            object(),
            {1, 2},
            lambda: 1,
            torch.zeros(2).to_sparse(),
            torch.zeros(2, device="meta"),
            np.array([object()]),
        ],
    )
    def test_unknown_values_have_no_fingerprint(self, strange: Any) -> None:
        assert found([strange]) == {}

    def test_a_self_referencing_list_has_no_fingerprint(self) -> None:
        endless: list[Any] = []
        endless.append(endless)
        assert found(endless) == {}

    def test_a_tensor_subclass_is_not_touched(self) -> None:
        class Remote(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                raise AssertionError("it was asked")

        assert found([torch.zeros(2).as_subclass(Remote)]) == {}

    def test_large_data_is_sampled(self) -> None:
        nested, terabyte = (
            [[list(range(2_000))] * 3] * 2_000,
            torch.zeros(1, dtype=torch.uint8).expand(1 << 20, 1 << 20),
        )
        assert calls_in(lambda: found(nested)) < 1_000_000, "of twelve million numbers"
        assert set(found(terabyte)) == {"values"}


class TestItems:
    def test_items_are_read_only_with_full_content(self) -> None:
        assert found(Items(never)) == {}
        assert found(Items(never), "off") == {}
        assert set(found(Items(float), "full")) == {"shapes", "items"}

    def test_other_values_differ_with_equal_shapes(self) -> None:
        one, other = (
            found(Items(lambda n, add=add: {"x": torch.full((3,), n + add), "y": n}), "full") for add in (0, 1)
        )
        assert one["shapes"] == other["shapes"]
        assert one["items"] != other["items"]

    @pytest.mark.parametrize(
        "item", [torch.zeros(2), torch.zeros(3).int(), [torch.zeros(3)], {"x": torch.zeros(3)}, None], ids=str
    )
    def test_other_shapes_differ(self, item: Any) -> None:
        assert (
            found(Items(lambda n: torch.zeros(3)), "full")["shapes"] != found(Items(lambda n: item), "full")["shapes"]
        )

    @pytest.mark.parametrize(
        "draw", [random.random, np.random.rand, lambda: torch.rand(2), np.random.default_rng().normal]
    )
    def test_random_augmentation_keeps_the_shape_fingerprint(self, draw: Callable[[], Any]) -> None:
        assert set(found(Items(lambda n: draw()), "full")) == {"shapes"}

    def test_random_items_use_the_same_seeds_on_every_rank(self) -> None:
        seen: list[list[Any]] = [[], []]
        for seed, drawn in enumerate(seen):
            dataset = Items(
                lambda n, drawn=drawn: drawn.append((random.random(), np.random.rand(), float(torch.rand(1)))),
                length=8,
            )
            with random_states_kept():
                seed_all(seed)
                found(dataset, "full")
        assert seen[0] == seen[1]
        # Nor is any of it read twice from the same state: what is random would seem not to be.
        assert len(set(seen[0])) == len(seen[0]) == 16

    def test_random_sizes_have_no_fingerprint(self) -> None:
        assert found(Items(lambda n: torch.zeros(int(torch.randint(1, 1_000, ())))), "full") == {}

    def test_unknown_objects_have_only_a_shape(self) -> None:
        assert set(found(Items(lambda n: object()), "full")) == {"shapes"}

    def test_an_exception_is_reported_as_a_problem(self) -> None:
        def fails(index: int) -> Any:
            random.random()
            raise OSError("no such\nfile")

        made = fingerprints(Items(fails), content="full")
        assert made == ({}, ("Reading samples for a fingerprint raised OSError: no such file",), None)

    def test_a_slow_dataset_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_DEADLINE_S", 0.05)
        made = fingerprints(Items(lambda n: time.sleep(0.02)), content="full")
        assert made.found == {}
        assert made.problems[0].startswith("Reading samples for a fingerprint was abandoned: ")

    @pytest.mark.parametrize("dataset", [Items(never, 0), Forbidden(), Forbidden(files=["a"])])
    def test_without_samples_or_an_index_no_item_is_read(self, dataset: Any) -> None:
        assert set(found(dataset, "full")) <= {"files"}


class TestBatches:
    def test_the_list_of_batches_counts(self) -> None:
        lists: list[Any] = [[[1, 2], [3]], [[1], [2, 3]], [1, 2, 3], [(1, 2), (4,)], [[1, 2], [3], []]]
        assert len({found(holding(), batches=batches)["batches"] for batches in lists}) == len(lists)

    def test_many_entries_are_sampled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plain_values, "WHOLE", 100)
        monkeypatch.setattr(plain_values, "SAMPLED", 10)
        many = [[n, n + 1] for n in range(60)]
        assert found(holding(), batches=many) == found(holding(), batches=list(many))
        assert found(holding(), batches=many) != found(holding(), batches=[*many[:-1], [0, 0]])


class TestHuggingFace:
    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        self.library = pytest.importorskip("datasets")

    def make(self, first: int = 0, length: int = 50) -> Any:
        return self.library.Dataset.from_dict({"x": list(range(first, first + length)), "s": ["a"] * length})

    def test_rows_count_and_transforms_are_ignored(self) -> None:
        plain = self.make()
        dressed = plain.with_transform(lambda rows: never(0))
        assert set(found(plain)) == {"values"}
        assert found(plain) == found(self.make()) == found(dressed)
        assert found(plain) != found(self.make(1))
        assert found(plain) != found(self.make(length=51))
        assert found(plain) != found(plain.rename_column("x", "z"))
        with pytest.raises(AssertionError):
            dressed[0]

    def test_a_transform_is_not_copied(self) -> None:
        class Heavy:
            def __call__(self, rows: Any) -> Any:
                return never(0)

            def __deepcopy__(self, memo: Any) -> Any:
                raise AssertionError("it was copied")

        dataset = self.make()
        dataset.set_transform(Heavy())
        before = dict(vars(dataset))
        assert found(dataset) == found(self.make())
        assert vars(dataset) == before

    def test_a_selection_counts(self) -> None:
        one, other = self.make().shuffle(seed=1), self.make().shuffle(seed=2)
        assert set(found(one)) == {"indices", "values"}
        assert found(one) == found(self.make().shuffle(seed=1))
        assert found(one)["indices"] != found(other)["indices"]
        assert found(one)["values"] != found(other)["values"]

    def test_a_large_selection_is_sampled_and_an_empty_one_allowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plain_values, "WHOLE", 10)
        monkeypatch.setattr(plain_values, "SAMPLED", 5)
        assert found(self.make().shuffle(seed=1))["indices"] != found(self.make().shuffle(seed=2))["indices"]
        assert set(found(self.make().select([]))) <= {"indices", "values"}

    def test_full_content_reads_the_whole_selection(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plain_values, "WHOLE", 10)
        monkeypatch.setattr(plain_values, "SAMPLED", 5)
        one, other = list(range(0, 40, 2)), list(range(0, 40, 2))
        other[next(place for place in range(20) if place not in positions(20, 5))] = 1
        tables = self.make().select(one), self.make().select(other)
        assert found(tables[0])["indices"] == found(tables[1])["indices"]
        assert found(tables[0], "full")["indices"] != found(tables[1], "full")["indices"]

    def test_an_iterable_dataset_is_not_read(self) -> None:
        assert found(self.make().to_iterable_dataset(2).map(never), "full") == {}


def test_content_off_reads_nothing() -> None:
    assert fingerprints(Subset(TensorDataset(torch.zeros(3)), [1]), content="off", batches=[1]) == ({}, (), None)


def test_a_dataset_that_always_raises_is_not_an_error() -> None:
    class Wild:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    made = fingerprints(Wild(), content="full")
    assert made.found == {}


SAME_EVERYWHERE = """
import torch, numpy as np
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from lightning_ncclsafe.probes.data.fingerprints import digest_of_batch, fingerprints

class Made:
    def __init__(self, **stored): vars(self).update(stored)
    def __len__(self): return 30
    def __getitem__(self, index): return {"x": torch.tensor(index), "s": str(index), "n": np.float32(index), "f": Made}

class Listed(Made):
    samples = [("/data/a/%d.png" % n, n % 3) for n in range(9)]

base = TensorDataset(torch.arange(3000.).reshape(1000, 3), torch.arange(1000))
datasets = [Subset(base, range(3, 90)), ConcatDataset([base, Listed()]), ["a", b"b", 1.5, {"k": (1, None)}], Listed()]
batch = {"x": base[0], "b": True, "a": "text"}
print([fingerprints(d, content=c, batches=[[1]]) for d in datasets for c in ("sample", "full")], digest_of_batch(batch))
"""


def test_another_process_makes_the_same_fingerprints(capsys: pytest.CaptureFixture[str]) -> None:
    """Another process has other string hashes, object addresses and generator states."""
    seed = next(seed for seed in ("1", "2") if seed != os.environ.get("PYTHONHASHSEED"))
    there = subprocess.run(
        [sys.executable, "-c", SAME_EVERYWHERE],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
    )
    assert there.returncode == 0, there.stderr
    exec(SAME_EVERYWHERE, {"__name__": "__main__"})
    assert capsys.readouterr().out == there.stdout
    assert there.stdout.count("'shapes'") == 4
    assert " at 0x" not in there.stdout


def test_a_batch_digest_depends_on_its_content() -> None:
    batches = [
        {"x": torch.zeros(2), "y": [1]},
        {"x": torch.ones(2), "y": [1]},
        {"x": torch.zeros(2), "y": [2]},
        [1.0],
        torch.ones(1, 1, dtype=torch.int64),
        ["a"],
        b"a",
        {"path": "/rank0/a.npy"},
        {"path": "/rank1/a.npy"},
    ]
    digests = [digest_of_batch(batch) for batch in batches]
    assert digests == [digest_of_batch(batch) for batch in batches]
    assert len(set(digests)) == len(batches)
    assert all(0 < digest < 2**63 for digest in digests)
    assert digest_of_batch({"x": object()}) == 0


@pytest.mark.parametrize(
    "batch",
    [
        3,
        [1, 2],
        (1, [2]),
        torch.tensor(4),
        torch.arange(3),
        np.arange(3),
        {"step": 1, "ids": [torch.arange(3)]},
        [],
        {},
    ],
    ids=str,
)
def test_a_batch_of_counters_has_no_digest(batch: Any) -> None:
    assert digest_of_batch(batch) == 0


def test_an_undigestible_batch_has_no_digest() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert digest_of_batch(endless) == 0
    assert digest_of_batch(10**5_000) == 0
