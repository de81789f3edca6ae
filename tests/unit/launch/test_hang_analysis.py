"""Which rank of a run that hangs is named, from what each has issued and where it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.launch import hang_analysis
from shardwright.launch.hang_analysis import RankSnapshot, describe, find_culprits

MINE = "/home/me/my_loss.py:12 my_loss"
OURS = str(Path(hang_analysis.__file__).parents[1] / "train" / "loop.py")


@pytest.fixture
def wait(tmp_path: Path) -> str:
    """The frame of a rank that waits for work it has begun: the line is what tells."""
    (tmp_path / "wire.py").write_text("def take(work):\n    work.wait()\n")
    return f"{tmp_path / 'wire.py'}:2 take"


def group(*collectives: Any, ranks: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """A group in which a rank has issued these; operations whose names end in ! are not done."""
    issued = [
        [number, operation.rstrip("!"), [[[size]], [[size]]], not operation.endswith("!")]
        for number, (operation, size) in enumerate(collectives, 1)
    ]
    return {"ranks": list(ranks), "collectives": issued}


def sight(rank: int, frame: str, groups: Any = None, ranks: int = 2, **options: Any) -> RankSnapshot:
    issued = {"groups": groups or {}, "sent": [], "received": []}
    issued |= {name: options.pop(name) for name in ("sent", "received") if name in options}
    given = {"issued": issued, "stack": (frame,), **options}
    return RankSnapshot(rank, ranks, "forward_backward of update 4", (4, 2), 12.0, **given)


def named(*sights: RankSnapshot) -> list[int]:
    return [one.rank for one in find_culprits(sights)]


DONE, LEFT = ("all_reduce", 8), ("all_reduce!", 9)


def test_the_rank_that_has_not_begun_a_collective_is_named(wait: str) -> None:
    """In code of its own or asleep: the other one waits in our code, which looks alike but for the collective it has begun."""
    waits = sight(0, f"{OURS}:1 finish", {"dp": group(DONE, LEFT)})
    assert named(waits, sight(1, MINE, {"dp": group(DONE)})) == [1]
    assert named(waits, sight(1, MINE)) == [1]  # it has begun none in this group
    assert named(waits, sight(1, MINE, issued=None)) == [1]  # it does not answer
    assert named(waits, sight(1, "", stack=(), issued=None, stopped=True)) == [1]
    text = describe([waits, sight(1, MINE, {"dp": group(DONE)}, note="while it handles MemoryError: no")])
    assert text[0].startswith("shardwright: rank 1 of 2 is stuck in forward_backward of update 4 (12 s")
    assert text[0].endswith(f", at {MINE}.")
    assert "begun: all_reduce (9) of ranks 0, 1: rank 1 has not begun it" in text[2]
    assert text[3].endswith("my_loss, while it handles MemoryError: no")


def test_what_a_rank_has_begun_and_does_not_wait_for_leaves_it_to_blame(wait: str) -> None:
    """Rank 1 has gathered ahead and sleeps; rank 0, which has not begun that gather, waits for it in another group."""
    waits = sight(0, wait, {"a": group(DONE, LEFT), "b": group(DONE)})
    assert named(waits, sight(1, MINE, {"a": group(DONE), "b": group(DONE, LEFT)})) == [1]
    posted = {"received": [[0, "pp", 3, 1]]}  # a receive asked for ahead, as a pipeline does
    assert named(waits, sight(1, MINE, {"a": group(DONE)}, **posted)) == [1]


def test_the_root_of_a_chain_is_named(wait: str) -> None:
    """Two groups of two by two: rank 3 sleeps, rank 2 waits for it, rank 0 for 2, rank 1 for 3 or for 0."""
    pair = {name: {"ranks": ranks} for name, ranks in {"t0": (0, 1), "t1": (2, 3), "d0": (0, 2), "d1": (1, 3)}.items()}
    late = {name: group(DONE, LEFT, **ranks) for name, ranks in pair.items()}
    early = {name: group(DONE, **ranks) for name, ranks in pair.items()}
    three = sight(3, MINE, {"t1": early["t1"], "d1": early["d1"]}, 4)
    two = sight(2, wait, {"t1": late["t1"], "d0": early["d0"]}, 4)
    zero = sight(0, wait, {"t0": early["t0"], "d0": late["d0"]}, 4)
    for one in (
        sight(1, wait, {"t0": early["t0"], "d1": late["d1"]}, 4),
        sight(1, wait, {"t0": late["t0"], "d1": early["d1"]}, 4),
    ):
        assert named(zero, one, two, three) == [3]


def test_a_rank_too_busy_to_answer_is_named_only_alone(wait: str) -> None:
    """Rank 0 waits as rank 1 does, and has not said so in time; rank 2 sleeps."""
    three = (0, 1, 2)
    one = sight(1, wait, {"dp": group(DONE, LEFT, ranks=three)}, 3)
    zero = sight(0, wait, ranks=3, issued=None)
    assert named(zero, one, sight(2, MINE, {"dp": group(DONE, ranks=three)}, 3)) == [2]
    assert named(zero, one, sight(2, wait, {"dp": group(DONE, LEFT, ranks=three)}, 3)) == [0]


def test_a_message_that_was_not_sent(wait: str) -> None:
    """Rank 2 has sent one of two messages of tag 7; rank 1 waits for the second, rank 0 for rank 1."""
    zero = sight(0, wait, received=[[1, "pp", 7, 3]], ranks=3)
    one = sight(1, wait, sent=[[0, "pp", 7, 2]], received=[[2, "pp", 7, 2]], ranks=3)
    two = sight(2, MINE, sent=[[1, "pp", 7, 1], [1, "pp", 8, 5]], ranks=3)
    assert named(zero, one, two) == [2]
    assert "begun: a message from rank 2: rank 2 has not begun it" in "\n".join(describe([zero, one, two]))


def test_different_collectives_name_the_odd_one(wait: str) -> None:
    """Of three the one that differs, by operation or size; of two the one that handles an error, or in the user's code."""
    three = (0, 1, 2)
    for other in (("all_gather!", 9), ("all_reduce!", 10)):
        usual = [sight(r, wait, {"dp": group(DONE, LEFT, ranks=three)}, 3) for r in (0, 2)]
        assert named(*usual, sight(1, wait, {"dp": group(DONE, other, ranks=three)}, 3)) == [1]
    ours = f"{OURS}:1 finish"
    inner = "/env/site-packages/torch/distributed/c10d.py:9 all_gather"
    inside = sight(0, inner, {"dp": group(DONE, LEFT)}, stack=(inner, ours))
    differs = {"dp": group(DONE, ("all_gather!", 9))}
    assert named(inside, sight(1, inner, differs, stack=(inner, MINE))) == [1]
    assert named(inside, sight(1, inner, differs, stack=(inner, ours), note="while it handles MemoryError: no")) == [1]
    both = [inside, sight(1, inner, differs, stack=(inner, ours))]
    assert named(*both) == [0, 1]
    assert "rank 1 is in all_gather (9) in its place" in "\n".join(describe(both))


def test_sizes_that_may_differ_between_ranks_do(wait: str) -> None:
    """Uneven pieces of an all-to-all are no fault, and no rank waits for another."""
    one = sight(1, wait, {"dp": group(DONE, ("all_to_all!", 4))})
    zero = sight(0, MINE, {"dp": group(DONE, ("all_to_all!", 9))})
    assert named(zero, one) == [0]  # nobody waits: by where they stand


def test_without_a_wait_the_place_and_the_position_decide(wait: str) -> None:
    ahead = RankSnapshot(0, 2, "step of update 4", (4, 4), 9.0, (MINE,), {})
    behind = RankSnapshot(1, 2, "data of update 4", (4, 1), 9.0, (MINE,), {})
    assert named(ahead, behind) == [1]
    assert named(ahead, RankSnapshot(1, 2, "data of update 4", (4, 1), 9.0, (wait,), {})) == [0]
    assert named(ahead, RankSnapshot(1, 2, "reduce of update 4", (4, 3), 9.0, ended=True)) == [0]


def test_a_wait_for_the_gpu_is_named(tmp_path: Path) -> None:
    """Also in a call that stands on several lines, of which Python names the first; a method of another name is own code."""
    (tmp_path / "mine.py").write_text(
        "def step(sums, device):\n"
        "    if sums:\n"
        "        loss, norm = (\n"
        "            sums.double()\n"
        "            .tolist()\n"
        "        )\n"
        "    for x in sums.items():\n"
        "        time.sleep(x)\n"
        "    torch.cuda.synchronize(device)\n"
    )
    lines = {4: ".tolist()", 3: ".tolist()", 2: "", 7: "", 8: "", 9: ".synchronize()", 99: ""}
    for line, call in lines.items():
        frame = f"{tmp_path / 'mine.py'}:{line} step"
        behind = {"dp": group(DONE)}
        said = describe([sight(0, frame, behind), sight(1, MINE, behind)])[1]
        if call:
            assert said.endswith(f"waits for the device in {call} at {frame}")
        else:
            assert said.endswith(f"in {frame}") and "waits" not in said
        assert named(sight(0, frame, behind), sight(1, MINE, behind)) == ([1] if call else [0, 1])
    gone = sight(0, f"{tmp_path / 'gone.py'}:3 f")
    assert describe([gone])[1].endswith("gone.py:3 f")
