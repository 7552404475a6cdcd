"""From the name of a method to its decoder."""

import jax
from flax import nnx
from jax.sharding import Mesh

from dflash_jax.decoding.chain import ArgmaxChain, SampledChain
from dflash_jax.decoding.generate import Decoder
from dflash_jax.decoding.speculative import Drafting, Method, SpeculativeDecoder
from dflash_jax.decoding.tree import Tree
from dflash_jax.models.architecture import DrafterArchitecture
from dflash_jax.models.target import FrozenTarget
from dflash_jax.parallel import sharding_of


def drafting_of(method: Method) -> Drafting:
    """How a method drafts and verifies.

    Raises:
        ValueError: plain decoding does neither; see `generate.py`.
    """
    if method.name == "plain":
        raise ValueError("plain decoding has no draft")
    if method.name == "tree":
        return Tree(method.budget, method.force_spine)
    return ArgmaxChain() if method.proposal == "argmax" else SampledChain()


def speculative_decoder(
    target: FrozenTarget, drafter_graph: nnx.GraphDef, arch: DrafterArchitecture, max_new_tokens: int, method: Method
) -> SpeculativeDecoder:
    """The functions of a method for these models."""
    graphs = target.graph, drafter_graph
    return SpeculativeDecoder(graphs, drafting_of(method), method, arch.block_size, target.stop_ids, max_new_tokens)


def make_decoder(decode: SpeculativeDecoder, target: FrozenTarget, mesh: Mesh, seed: int = 0) -> Decoder:
    """`decoder(batch, drafter params) -> SpeculativeAnswers`."""
    key = jax.device_put(jax.random.key(seed), sharding_of(mesh))
    return Decoder(decode, mesh, lambda batch, params: ((target.params, params), batch, key))
