"""The drafter step: features in, summed gradients, one update. Pure functions, jitted with explicit shardings.

`accumulate(state, tables, features) -> state, finished` adds a micro-batch's unnormalised gradient and sums;
`update(state) -> state, metrics` divides by the global weight, clips, applies AdamW and empties the sums. So loss,
gradient and norm do not depend on accumulation or mesh. The gradient of a step is left for the next step's first
micro-batch to overwrite: zeros would cost a pass over it, and a copy. The state is donated to both; `finished` is a
small output of its own, by which the host can see that an execution is over.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dflash_jax.data.buckets import Bucket
from dflash_jax.data.loader import Batch
from dflash_jax.models import weights
from dflash_jax.models.drafter import Drafter, scale_logits
from dflash_jax.models.target import Target
from dflash_jax.models.vocabulary import top_log_probabilities
from dflash_jax.models.weights import Params
from dflash_jax.parallel import Meshes, on_mesh, sharding_of
from dflash_jax.telemetry.drafting import (
    TREE_BUDGETS,
    DraftingSums,
    drafting_metrics,
    drafting_sums,
    tree_metrics,
)
from dflash_jax.telemetry.trees import tree_acceptance
from dflash_jax.training.anchors import Blocks, draw_anchors, eligible_anchors, lay_out_blocks
from dflash_jax.training.handover import Handover, Units
from dflash_jax.training.health import HealthState, Reading, adaptive_factor, foresee, observe, recent_quantiles
from dflash_jax.training.objective import d_pace_weights, position_weights, row_losses
from dflash_jax.training.optimizer import keep, optimizer_shardings
from dflash_jax.training.state import DraftSettings, Features, StepSettings, Tables, TrainState, tables_of


def target_features(
    graph: nnx.GraphDef, settings: DraftSettings, handover: Handover, params: Params, batch: Batch
) -> tuple[tuple[Units, ...], Array]:
    """Run the frozen target as far as needed; the outputs of the tapped blocks, ready to be moved.

    Rows are right-padded, so no real token sees padding.
    """
    target: Target = nnx.merge(graph, params)
    positions = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1])[None, :], batch.tokens.shape)
    taps = settings.drafter.target_layer_ids
    states = target.states(batch.tokens, positions, taps, settings.asks_target, settings.target_attention)
    return tuple(handover.cut(state) for state in states), batch.lengths.sum()


def block_loss(
    params: Params,
    graph: nnx.GraphDef,
    tables: Tables,
    taps: tuple[Float[Array, "batch seq hidden"], ...],
    blocks: Blocks,
    lengths: Int[Array, "batch"],
    settings: DraftSettings,
) -> tuple[Float[Array, ""], tuple[DraftingSums, Array, Array]]:
    """Unnormalised loss of a batch of blocks (arXiv 2602.06036, section 4).

    Beside it the sums, the final hidden states of all predicted rows `[batch, blocks, offsets, hidden]`, and the ranks
    of their labels `[batch, blocks, offsets]`.
    """
    drafter: Drafter = nnx.merge(graph, params)
    batch, seq = taps[0].shape[:2]
    positions = jnp.broadcast_to(jnp.arange(seq)[None, :], (batch, seq))
    taps = tuple(tap.astype(settings.compute_dtype) for tap in taps)
    taps, final = (taps[:-1], taps[-1]) if settings.asks_target else (taps, None)
    context = drafter.context(taps, positions, settings.split_fc, limit=seq)
    hidden = drafter(
        blocks.tokens,
        blocks.anchors,
        context,
        tables.embedding,
        settings.compute_dtype,
        attention=settings.attention,
        remat=settings.remat,
        scan=settings.scan_layers,
    )
    shape = blocks.valid.shape
    # The target predicts the token at a position from the one before.
    before = jnp.clip(blocks.anchors[:, :, None] + jnp.arange(shape[2])[None, None, :], 0, seq - 1)
    by_row = row_losses(
        hidden.reshape(batch, -1, hidden.shape[-1]),
        tables.projection,
        blocks.labels.reshape(batch, -1),
        blocks.valid.reshape(batch, -1),
        settings.drafter,
        settings.loss,
        final,
        before.reshape(batch, -1),
    )
    losses, label_losses, ranks = (x.reshape(shape) for x in by_row)
    if settings.weighting == "d_pace":
        label_weights = d_pace_weights(label_losses, blocks.valid, settings.d_pace_alpha)
    else:
        decay = position_weights(settings.drafter.block_size, settings.gamma)
        label_weights = blocks.valid.astype(jnp.float32) * decay[None, None, :]
    loss = (label_weights * losses).sum()
    sums = drafting_sums(loss, label_weights.sum(), ranks, blocks.valid, blocks.keep, lengths, seq)
    return loss, (sums, hidden, ranks)


def with_trees(
    sums: DraftingSums,
    tables: Tables,
    hidden: Float[Array, "batch blocks offsets hidden"],
    ranks: Int[Array, "batch blocks offsets"],
    blocks: Blocks,
    settings: DraftSettings,
    due: Array,
) -> DraftingSums:
    """`sums` with what trees would accept of some blocks of every row, where that is due; elsewhere it costs nothing.

    The blocks are taken at equal distances; the logits of one block a row are in memory at a time.
    """
    batch, count = ranks.shape[:2]
    looked_at = min(count, -(-settings.tree_blocks // batch))
    if not looked_at:
        return sums
    chosen = np.arange(looked_at) * count // looked_at

    def look(_: None) -> tuple[Array, Array]:
        def of_block(block: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
            hidden, ranks, valid, keep = block
            scale = partial(scale_logits, arch=settings.drafter)
            top = top_log_probabilities(hidden, tables.projection, max(TREE_BUDGETS), scale)
            accepted = [jax.vmap(partial(tree_acceptance, budget=budget))(top, ranks, valid) for budget in TREE_BUDGETS]
            return jnp.stack([(depth * keep).sum() for depth in accepted]), keep.sum(dtype=jnp.int32)

        by_block = [jnp.moveaxis(x[:, chosen], 1, 0) for x in (hidden, ranks, blocks.valid, blocks.keep)]
        accepted, looked = jax.lax.map(of_block, tuple(by_block))
        return accepted.sum(axis=0), looked.sum(axis=0)

    def skip(_: None) -> tuple[Array, Array]:
        return sums.tree_accepted, sums.tree_blocks

    accepted, looked = jax.lax.cond(due, look, skip, None)
    return replace(sums, tree_accepted=accepted, tree_blocks=looked)


def accumulate(
    graph: nnx.GraphDef, settings: StepSettings, state: TrainState, tables: Tables, features: Features
) -> tuple[TrainState, Array]:
    """Add one micro-batch: draw its anchors, lay out its blocks, sum gradient and metrics."""
    batch = features.batch
    eligible = eligible_anchors(batch.loss_mask, batch.lengths, settings.drafter.block_size)
    anchors, keep = draw_anchors(state.key, batch.epoch, batch.row_ids, eligible, settings.anchors)
    blocks = lay_out_blocks(
        batch.tokens,
        batch.loss_mask,
        batch.lengths,
        anchors,
        keep,
        settings.drafter.block_size,
    )
    taps = features.taps
    if settings.noise is not None:
        tapped, level = len(settings.drafter.target_layer_ids), settings.noise.level(state.step)
        noisy = settings.noise.add(taps[:tapped], level, state.key, batch.epoch, batch.row_ids)
        taps = (*noisy, *taps[tapped:])
    gradient, (sums, hidden, ranks) = jax.grad(block_loss, has_aux=True)(
        state.params, graph, tables, taps, blocks, batch.lengths, settings
    )
    first_of_step = state.sums.padded_tokens.sum() == 0
    gradient = jax.tree.map(lambda old, new: jnp.where(first_of_step, new, old + new), state.gradient, gradient)
    trees_due = first_of_step & ((state.step + 1) % settings.tree_every == 0)
    sums = with_trees(sums, tables, hidden, ranks, blocks, settings, trees_due)
    state = replace(
        state,
        gradient=gradient,
        sums=state.sums.plus(settings.edges.index(batch.tokens.shape[1]), sums),
    )
    return state, sums.tokens


def update(settings: StepSettings, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """One optimizer step on the accumulated gradient, unless the monitor has it skipped.

    The reported norm is the one that `optax.clip_by_global_norm` computes from the same arrays: the compiler merges
    the two into one reduction a weight, and the norms by module are sums of the same.
    """
    section, steps = settings.health, settings.baseline_steps
    total = state.sums.total()
    scale = 1.0 / jnp.maximum(total.weight, 1e-30)
    grad_norm = scale * optax.tree.norm(state.gradient)
    drafting = drafting_metrics(total)
    squares = module_squares(state.gradient)
    reading = Reading(
        norm=grad_norm,
        loss=drafting["loss"],
        module_shares=squares / jnp.maximum(squares.sum(), 1e-30),
        clipped=grad_norm > settings.clip_norm,
        empty=total.weight == 0,
        learning=state.applied >= settings.learning_from,
    )
    skip = foresee(section, state.health, reading, steps)
    factor = adaptive_factor(section, state.health, grad_norm, settings.clip_norm, steps)
    updates, optimizer_state = settings.optimizer.update(
        state.gradient, state.optimizer, state.params, scale=scale, factor=factor, skip=skip
    )
    params = keep(skip, state.params, optax.apply_updates(state.params, updates))

    def trees(sums: DraftingSums) -> dict[str, Array]:
        return tree_metrics(sums) if settings.tree_blocks else {}

    metrics = {
        **drafting,
        **trees(total),
        "by_bucket": {**drafting_metrics(state.sums), **trees(state.sums)},
        "grad_norm": grad_norm,
        "learning_rate": settings.schedule(state.applied),
    }
    health = state.health
    if section.enabled:
        update_norm = optax.tree.norm(updates)
        health, verdict = observe(section, health, replace(reading, update_norm=update_norm), steps)
        if section.judges_updates:  # the one case that costs a copy of all state
            skip = verdict.skip
            params, optimizer_state = keep(skip, (state.params, state.optimizer), (params, optimizer_state))
        update_norm = jnp.where(skip, 0.0, update_norm)
        param_norm = optax.tree.norm(params)  # of the new weights: the old ones are overwritten in place
        metrics |= {
            "clip_factor": factor * jnp.minimum(1.0, settings.clip_norm / jnp.maximum(grad_norm, 1e-30)),
            "update_norm": update_norm,
            "param_norm": param_norm,
            "update_ratio": update_norm / jnp.maximum(param_norm, 1e-30),
            "norm_z": verdict.z,
            "norm_baseline": recent_quantiles(health),
            "module_norms": scale * jnp.sqrt(squares),
            "flagged_module": verdict.module,
            "flags": verdict.flags,
            "skipped": health.skipped,
            "skipped_in_row": health.skipped_in_row,
            "nonfinite": health.nonfinite,
            "spike_score": health.severe / health.steps,
        }
    if settings.noise is not None:
        metrics["feature_noise"] = settings.noise.level(state.step)
    state = TrainState(
        step=state.step + 1,
        key=state.key,
        params=params,
        optimizer=optimizer_state,
        gradient=state.gradient,
        sums=DraftingSums.zeros(settings.drafter.block_size, len(settings.edges)),
        health=health,
        applied=state.applied + ~skip,
    )
    return state, metrics


def module_squares(gradient: Params) -> Float[Array, "modules"]:
    """Squared norm of each module, in the order of `module_names`."""
    grouped: dict[str, Array] = {}
    for path, leaf in jax.tree.leaves_with_path(gradient):
        name = _module_of(path)
        grouped[name] = grouped.get(name, jnp.float32(0.0)) + jnp.sum(jnp.square(leaf))
    return jnp.stack(list(grouped.values()))


def module_names(specs: Params) -> list[str]:
    """The modules that norms are kept by: `fc`, `norm`, .., and of each layer its attention, its MLP and its norms."""
    return list(dict.fromkeys(_module_of(path) for path, _ in jax.tree.leaves_with_path(specs)))


def _module_of(path: tuple[Any, ...]) -> str:
    names = [str(getattr(entry, "key", getattr(entry, "idx", entry))) for entry in path]
    if names[0] != "layers":
        return names[0]
    part = names[2] if names[2] in ("self_attn", "mlp") else "norms"
    return f"layers.{names[1]}.{part}"


@dataclass(frozen=True)
class Step:
    """The jitted functions of a run and where their arguments live; `compiled.py` makes executables of them."""

    features: Callable[[Params, Batch], tuple[tuple[Units, ...], Array]]
    """On the target's mesh; see `target_features`."""
    assemble: Callable[[tuple[Units, ...]], tuple[Array, ...]]
    """On the drafter's mesh: the taps, of the units that have arrived."""
    accumulate: Callable[[TrainState, Tables, Features], tuple[TrainState, Array]]
    update: Callable[[TrainState], tuple[TrainState, dict[str, Array]]]
    handover: Handover
    graph: nnx.GraphDef
    """The drafter's."""
    specs: Params
    """`WeightSpec` of each drafter weight."""
    state_shardings: TrainState
    tables_shardings: Tables
    batch_shardings: Batch
    """On the target's mesh."""
    feature_shardings: Features
    """On the drafter's mesh."""

    @property
    def meshes(self) -> Meshes:
        return self.handover.meshes


def make_step(settings: StepSettings, meshes: Meshes) -> Step:
    """Jit the functions over their meshes, with explicit shardings in and out and the state donated."""
    target_graph, target_specs = weights.split(Target(settings.target))
    graph, specs = weights.split(Drafter(settings.drafter))
    handover, drafter_mesh = Handover(meshes), meshes.drafter
    taps, replicated = settings.states, sharding_of(drafter_mesh)
    batch = _batch_shardings(meshes.target)
    units = ((sharding_of(meshes.target, "batch", None, None),) * handover.units_sent,) * taps
    rows = sharding_of(drafter_mesh, "batch", None, None)
    arrived = ((rows,) * handover.units_received,) * taps
    features = Features(_batch_shardings(drafter_mesh), (rows,) * taps)
    target = weights.shardings(target_specs, meshes.target)
    tables = tables_of(weights.shardings(target_specs, drafter_mesh))
    params = weights.shardings(specs, drafter_mesh)
    state = TrainState(
        step=replicated,
        key=replicated,
        params=params,
        optimizer=optimizer_shardings(settings.optimizer, weights.abstract(specs, drafter_mesh), params, replicated),
        gradient=params,
        sums=jax.tree.map(lambda _: replicated, jax.eval_shape(lambda: DraftingSums.zeros(2, 1))),
        health=jax.tree.map(lambda _: replicated, jax.eval_shape(lambda: HealthState.start(1))),
        applied=replicated,
    )
    return Step(
        features=jax.jit(
            on_mesh(meshes.target, partial(target_features, target_graph, settings, handover)),
            in_shardings=(target, batch),
            out_shardings=(units, sharding_of(meshes.target)),
        ),
        assemble=jax.jit(
            lambda arrived: tuple(handover.join(units) for units in arrived),
            in_shardings=(arrived,),
            out_shardings=features.taps,
        ),
        accumulate=jax.jit(
            on_mesh(drafter_mesh, partial(accumulate, graph, settings)),
            in_shardings=(state, tables, features),
            out_shardings=(state, replicated),
            donate_argnums=0,
        ),
        update=jax.jit(
            partial(update, settings), in_shardings=(state,), out_shardings=(state, replicated), donate_argnums=0
        ),
        handover=handover,
        graph=graph,
        specs=specs,
        state_shardings=state,
        tables_shardings=tables,
        batch_shardings=batch,
        feature_shardings=features,
    )


def _batch_shardings(mesh: Mesh) -> Batch:
    rows, matrix = sharding_of(mesh, "batch"), sharding_of(mesh, "batch", None)
    return Batch(matrix, matrix, rows, rows, sharding_of(mesh))


def init_state(step: Step, settings: StepSettings, seed: int, params: Params | None = None) -> TrainState:
    """The state before step 0: fresh weights N(0, 0.02), or the given ones."""
    init_key, anchor_key = jax.random.split(jax.random.key(seed))
    if params is None:
        params = weights.initialise(step.specs, init_key, step.meshes.drafter)

    def build(params: Params, key: Array) -> TrainState:
        return TrainState(
            step=jnp.int32(0),
            key=key,
            params=params,
            optimizer=settings.optimizer.init(params),
            gradient=jax.tree.map(jnp.zeros_like, params),
            sums=DraftingSums.zeros(settings.drafter.block_size, len(settings.edges)),
            health=HealthState.start(len(module_names(step.specs))),
            applied=jnp.int32(0),
        )

    return jax.jit(build, out_shardings=step.state_shardings, donate_argnums=0)(params, anchor_key)


def abstract_state(step: Step, settings: StepSettings) -> TrainState:
    """Shapes, dtypes and shardings of the state, without arrays: for compiling ahead and for restoring."""
    params = weights.abstract(step.specs, step.meshes.drafter)

    def build(params: Params) -> TrainState:
        return TrainState(
            step=jnp.int32(0),
            key=jax.random.key(0),
            params=params,
            optimizer=settings.optimizer.init(params),
            gradient=params,
            sums=DraftingSums.zeros(settings.drafter.block_size, len(settings.edges)),
            health=HealthState.start(len(module_names(step.specs))),
            applied=jnp.int32(0),
        )

    shapes = jax.eval_shape(build, params)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes, step.state_shardings
    )


def abstract_batch(shardings: Batch, bucket: Bucket) -> Batch:
    """Shapes of a bucket's batches."""
    tokens, vector = ((bucket.rows, bucket.edge), jnp.int32), ((bucket.rows,), jnp.int32)
    shapes = Batch(tokens, (tokens[0], jnp.bool_), vector, vector, ((), jnp.int32))
    return jax.tree.map(lambda sharding, shape: jax.ShapeDtypeStruct(*shape, sharding=sharding), shardings, shapes)


def abstract_features(step: Step, settings: StepSettings, bucket: Bucket) -> Features:
    """Shapes of a bucket's features."""
    shape = (bucket.rows, bucket.edge, settings.target.hidden_size)
    return Features(
        abstract_batch(step.feature_shardings.batch, bucket),
        tuple(
            jax.ShapeDtypeStruct(shape, settings.compute_dtype, sharding=sharding)
            for sharding in step.feature_shardings.taps
        ),
    )
