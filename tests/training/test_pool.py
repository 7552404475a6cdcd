"""The pool: which batch is next, what the choice may depend on, and how slots come back."""

from collections import Counter

import numpy as np
import pytest

from dflash_jax.data.loader import Batch, LoadedBatch
from dflash_jax.data.plan import interleave
from dflash_jax.telemetry.stages import Completion
from dflash_jax.training.pool import DrawRule, FeatureBatch, FeaturePool
from dflash_jax.training.state import Features

SHARES = {16: 6, 32: 8, 48: 10, 64: 11, 80: 13, 96: 52}


class Step:
    """Stands for an output of a drafter step that finishes when it is told to."""

    def __init__(self):
        self.finished, self.waited_for = False, False

    def is_ready(self):
        return self.finished

    def block_until_ready(self):
        self.waited_for = self.finished = True


def item(batch_id, epoch, edge):
    nothing = Batch(None, None, None, None, None)
    batch = LoadedBatch(batch_id, epoch, edge, edge, edge, nothing, 0.0)
    return FeatureBatch(batch, Features(nothing, ()), Completion(Step()))


def plan_of(epochs, order="interleave", shares=SHARES, seed=0):
    """Items of whole epochs, in the order of the plan."""
    kinds = np.repeat(list(shares), list(shares.values()))
    items = []
    for epoch in range(epochs):
        rng = np.random.default_rng((seed, epoch))
        order_of = interleave(list(shares.values())) if order == "interleave" else rng.permutation(len(kinds))
        items += [item(len(items) + n, epoch, int(kinds[index])) for n, index in enumerate(order_of)]
    return items


def consume(items, draw, min_ready=10, slots=12, per_epoch=100, arrivals=None):
    """Edges in the order of the draws. `arrivals` says how many batches may come before each draw."""
    pool = FeaturePool(slots, min_ready, DrawRule(draw, SHARES, seed=7), 0, {})
    read, edges, ids = 0, [], []
    while len(edges) < len(items):
        room = slots - len(pool) if arrivals is None else arrivals(len(edges))
        for _ in range(min(room, slots - len(pool), len(items) - read)):
            pool.put(items[read])
            read += 1
        over = pool.oldest_epoch is not None and read >= (pool.oldest_epoch + 1) * per_epoch
        if pool.can_draw(over):
            drawn = pool.draw()
            edges.append(drawn.batch.edge)
            ids.append(drawn.batch.batch_id)
    return edges, ids


def long_share_std(edges):
    return (np.array(edges[: len(edges) // 8 * 8]).reshape(-1, 8) == 96).mean(axis=1).std()


@pytest.mark.parametrize("draw", ["deficit", "fifo", "random"])
def test_every_batch_is_drawn_once_and_epoch_by_epoch(draw):
    items = plan_of(3)
    _, ids = consume(items, draw)
    assert sorted(ids) == list(range(300))
    assert [batch_id // 100 for batch_id in ids] == sorted(batch_id // 100 for batch_id in ids)


def test_fifo_keeps_the_order_of_the_plan():
    assert consume(plan_of(2), "fifo")[1] == list(range(200))


@pytest.mark.parametrize("draw", ["deficit", "random"])
def test_draws_do_not_depend_on_what_has_arrived(draw):
    """One batch at a time, bursts, more slots: the same order."""
    items = plan_of(2, "shuffle")
    expected = consume(items, draw)
    rng = np.random.default_rng(0)
    assert consume(items, draw, slots=40) == expected
    assert consume(items, draw, arrivals=lambda done: 1) == expected
    assert consume(items, draw, slots=40, arrivals=lambda done: int(rng.integers(0, 9))) == expected


def test_deficit_keeps_the_gain_of_interleaving_and_random_throws_it_away():
    items = plan_of(8)
    spread = {draw: long_share_std(consume(items, draw)[0]) for draw in ("fifo", "deficit", "random")}
    assert spread["fifo"] <= 0.05
    assert spread["deficit"] <= 0.05
    assert spread["random"] > 0.1


def test_deficit_repairs_a_shuffled_stream_within_its_window():
    items = plan_of(8, "shuffle")
    assert long_share_std(consume(items, "deficit")[0]) < long_share_std(consume(items, "fifo")[0])


def test_deficit_takes_the_bucket_furthest_below_its_quota():
    rule = DrawRule("deficit", {16: 1, 32: 3}, seed=0)
    assert rule.choose([16, 32, 32], {}, 0) == 1
    assert rule.choose([16, 32], {32: 2}, 0) == 0
    assert rule.choose([32, 16], {16: 1}, 0) == 0
    # Equal deficits: the older batch.
    assert DrawRule("deficit", {16: 1, 32: 1}, 0).choose([32, 16], {}, 0) == 0


def test_random_is_fixed_by_seed_epoch_and_draw():
    items = plan_of(2)
    assert consume(items, "random") == consume(items, "random")
    rule = DrawRule("random", SHARES, seed=1)
    edges = [16] * 10
    drawn = Counter(rule.choose(edges, {16: done}, epoch) for done in range(40) for epoch in range(5))
    assert set(drawn) == set(range(10))


def test_drawing_waits_for_min_ready_or_the_end_of_the_epoch():
    pool = FeaturePool(4, 3, DrawRule("fifo", {16: 3}, 0), 0, {})
    assert not pool.can_draw(epoch_is_over=True)
    pool.put(item(0, 0, 16))
    pool.put(item(1, 0, 16))
    assert not pool.can_draw(epoch_is_over=False)
    assert pool.can_draw(epoch_is_over=True)
    pool.put(item(2, 1, 16))  # of the next epoch: no candidate yet
    assert not pool.can_draw(epoch_is_over=False)
    assert pool.waiting == (0, 1, 2)


def test_a_slot_is_taken_until_its_step_has_finished():
    pool = FeaturePool(2, 1, DrawRule("fifo", {16: 9}, 0), 0, {})
    steps = [Step(), Step()]
    for number, step in enumerate(steps):
        assert pool.has_room()
        pool.put(item(number, 0, 16))
        pool.draw()
        pool.give_back(step)
    assert not pool.has_room()
    steps[0].finished = True
    assert pool.has_room()
    pool.put(item(2, 0, 16))
    assert not pool.has_room()
    pool.wait_for_room()
    assert steps[1].waited_for
    assert pool.has_room()


def test_ready_are_those_whose_features_are_computed():
    pool = FeaturePool(4, 1, DrawRule("fifo", {16: 9}, 0), 0, {})
    items = [item(number, 0, 16) for number in range(3)]
    for one in items:
        pool.put(one)
    assert pool.ready == 0
    items[1].computed.output.finished = True
    assert pool.ready == 1


def test_a_step_that_failed_raises_where_it_is_waited_for():
    class Failed(Step):
        def block_until_ready(self):
            raise RuntimeError("the device fell off the bus")

    pool = FeaturePool(1, 1, DrawRule("fifo", {16: 9}, 0), 0, {})
    pool.put(item(0, 0, 16))
    pool.draw()
    pool.give_back(Failed())
    assert not pool.has_room()
    with pytest.raises(RuntimeError, match="fell off the bus"):
        pool.wait_for_room()


def test_waiting_is_for_the_oldest_step():
    pool = FeaturePool(3, 1, DrawRule("fifo", {16: 9}, 0), 0, {})
    steps = [Step(), Step(), Step()]
    for number, step in enumerate(steps):
        pool.put(item(number, 0, 16))
        pool.draw()
        pool.give_back(step)
    pool.wait_for_room()
    assert [step.waited_for for step in steps] == [True, False, False]
