"""Configs of published models in and out, and the rules between target, drafter and mesh."""

from dataclasses import replace

import pytest

from dflash_jax.errors import UserError
from dflash_jax.models import weights
from dflash_jax.models.architecture import (
    FULL,
    SLIDING,
    Llama3Scaling,
    Rope,
    check_mesh,
    check_pair,
    default_target_layer_ids,
    parse_drafter,
    parse_target,
    render_drafter,
    resolve_drafter,
)
from dflash_jax.models.drafter import Drafter
from dflash_jax.sections import DrafterSection
from tests.helpers import tiny_drafter, tiny_target

QWEN3_4B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

QWEN2 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

LLAMA = {
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_scaling": LLAMA3_SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}

FLAT_DRAFTER = {
    **QWEN3_4B,
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "layer_types": [FULL] * 5,
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "tie_word_embeddings": False,
}
"""Qwen3-4B-DFlash-b16 as published: block size at the top level."""

NESTED_DRAFTER = {
    **{key: value for key, value in FLAT_DRAFTER.items() if key not in ("block_size", "rope_theta", "rope_scaling")},
    "dflash_config": {"block_size": 16, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
}
"""The same in the layout of transformers 5: block size and rotary base nested."""


class TestDefaultTargetLayers:
    @pytest.mark.parametrize(
        ("layers", "taps", "expected"),
        [
            (36, 5, (1, 9, 17, 25, 33)),
            (32, 5, (1, 8, 15, 22, 29)),
            (40, 5, (1, 10, 19, 28, 37)),
            (48, 5, (1, 12, 23, 34, 45)),
            (64, 5, (1, 16, 31, 46, 61)),
            (28, 5, (1, 7, 13, 19, 25)),
            (24, 5, (1, 6, 11, 16, 21)),
            (16, 5, (1, 4, 7, 10, 13)),
            (60, 6, (1, 12, 23, 35, 46, 57)),
            (61, 6, (1, 12, 24, 35, 47, 58)),
            (36, 1, (18,)),
        ],
    )
    def test_published_values(self, layers, taps, expected):
        assert default_target_layer_ids(layers, taps) == expected


class TestParseTarget:
    def test_qwen3(self):
        arch = parse_target(QWEN3_4B, "here")
        assert (arch.family, arch.num_layers, arch.hidden_size, arch.vocab_size) == ("qwen3", 36, 2560, 151936)
        assert (arch.num_heads, arch.num_kv_heads, arch.head_dim) == (32, 8, 128)
        assert (arch.qk_norm, arch.qkv_bias, arch.output_bias) == (True, False, False)
        assert arch.tie_word_embeddings is True
        assert arch.rope == Rope(1e6)

    def test_qwen2_has_biases_on_queries_keys_and_values_only(self):
        arch = parse_target(QWEN2, "here")
        assert (arch.qk_norm, arch.qkv_bias, arch.output_bias) == (False, True, False)
        assert arch.head_dim == 64
        assert arch.rope == Rope(1e6)

    def test_llama(self):
        arch = parse_target(LLAMA, "here")
        assert (arch.qk_norm, arch.qkv_bias, arch.output_bias) == (False, False, False)
        assert arch.head_dim == 128
        assert arch.rms_norm_eps == 1e-5
        assert arch.rope == Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))

    def test_attention_bias_of_llama_covers_the_output(self):
        arch = parse_target({**LLAMA, "attention_bias": True}, "here")
        assert (arch.qkv_bias, arch.output_bias) == (True, True)

    def test_without_key_value_heads_every_head_has_its_own(self):
        config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
        assert parse_target(config, "here").num_kv_heads == 32

    @pytest.mark.parametrize("config", [QWEN3_4B, QWEN2, LLAMA], ids=["qwen3", "qwen2", "llama"])
    def test_rope_parameters_of_transformers_5_mean_the_same(self, config):
        newer = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
        newer["rope_parameters"] = {
            "rope_theta": config["rope_theta"],
            **(config.get("rope_scaling") or {"rope_type": "default"}),
        }
        assert parse_target(newer, "here") == parse_target(config, "here")

    def test_older_files_call_the_rope_type_type(self):
        scaling = {**LLAMA3_SCALING, "type": "llama3"}
        del scaling["rope_type"]
        assert parse_target({**LLAMA, "rope_scaling": scaling}, "here") == parse_target(LLAMA, "here")

    def test_windows(self):
        """By `layer_types`, or in older files from `max_window_layers` on; only where the config says so."""
        sliding = {**QWEN2, "sliding_window": 9, "use_sliding_window": True}
        assert parse_target(QWEN2, "here").window(23) is None
        arch = parse_target({**sliding, "max_window_layers": 22}, "here")
        assert [arch.window(layer) for layer in range(21, 24)] == [None, 9, 9]
        arch = parse_target({**sliding, "layer_types": [SLIDING] + [FULL] * 23, "max_window_layers": 22}, "here")
        assert arch.windows == (9,) + (None,) * 23
        assert parse_target({**sliding, "model_type": "llama"}, "here").windows == ()

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"model_type": "gemma3"}, "model_type 'gemma3' is not supported; this reads qwen3, qwen2 and llama"),
            ({"model_type": None}, "model_type None is not supported"),
            (
                {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": None},
                "sliding_window is missing",
            ),
            (
                {
                    "model_type": "qwen3",
                    "use_sliding_window": True,
                    "sliding_window": 9,
                    "layer_types": [SLIDING, "linear_attention"],
                },
                "layer_types ['sliding_attention', 'linear_attention'] must name full_attention or",
            ),
            ({"mlp_bias": True}, "mlp_bias"),
            ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
            ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "rope scaling lacks low_freq_factor"),
            ({"vocab_size": None}, "vocab_size is missing"),
            ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ],
    )
    def test_refusals_name_the_file_and_the_key(self, changes, expected):
        with pytest.raises(UserError) as refusal:
            parse_target({**LLAMA, **changes}, "models/x/config.json")
        assert str(refusal.value).startswith("models/x/config.json: ")
        assert expected in str(refusal.value)


class TestParseDrafter:
    def test_flat_layout(self):
        arch = parse_drafter(FLAT_DRAFTER, "here")
        assert (arch.block_size, arch.mask_token_id, arch.target_layer_ids) == (16, 151669, (1, 9, 17, 25, 33))
        assert (arch.num_layers, arch.num_target_layers) == (5, 36)
        assert (arch.hidden_size, arch.target_hidden_size) == (2560, 2560)
        assert arch.rope == Rope(1e6)
        assert [arch.window(layer) for layer in range(5)] == [None] * 5
        assert [arch.causal(layer) for layer in range(5)] == [False] * 5

    def test_nested_layout_means_the_same(self):
        assert parse_drafter(NESTED_DRAFTER, "here") == parse_drafter(FLAT_DRAFTER, "here")

    def test_nested_values_win(self):
        assert parse_drafter({**NESTED_DRAFTER, "block_size": 4}, "here").block_size == 16

    def test_sliding_layers_are_causal_unless_told_otherwise(self):
        """Qwen3.6-27B-DFlash: four sliding layers and a full one."""
        config = {**FLAT_DRAFTER, "layer_types": [SLIDING] * 4 + [FULL], "sliding_window": 2048}
        arch = parse_drafter(config, "here")
        assert [arch.window(layer) for layer in range(5)] == [2048] * 4 + [None]
        assert [arch.causal(layer) for layer in range(5)] == [True] * 4 + [False]
        both_ways = parse_drafter({**config, "is_causal": False}, "here")
        assert [both_ways.causal(layer) for layer in range(5)] == [False] * 5

    def test_output_scaling(self):
        arch = parse_drafter({**FLAT_DRAFTER, "final_logit_softcapping": 30.0}, "here")
        assert (arch.final_logit_softcapping, arch.output_multiplier, arch.input_embedding_scale) == (30.0, 1.0, 1.0)

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"architectures": ["DFlash2DraftModel"]}, "this is a DFlash 2 drafter"),
            ({"dflash_config": {**NESTED_DRAFTER["dflash_config"], "conv_kernel_size": 2}}, "this is a DFlash 2"),
            ({"dflash_config": {**NESTED_DRAFTER["dflash_config"], "selector_rank": 256}}, "this is a DFlash 2"),
            ({"dflash_config": {"mask_token_id": 3}}, "target_layer_ids is missing"),
            ({"dflash_config": {"target_layer_ids": [1, 2]}}, "mask_token_id is missing"),
            ({"block_size": None}, "block_size is missing"),
            ({"num_target_layers": None}, "num_target_layers is missing"),
            ({"attention_bias": True}, "attention_bias"),
            ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
            ({"layer_types": [FULL] * 4}, "for each of 5 layers"),
            ({"layer_types": [FULL] * 4 + ["linear_attention"]}, "layer_types"),
            ({"layer_types": [SLIDING] * 5}, "sliding_window is None"),
        ],
    )
    def test_refusals_name_the_file_and_the_key(self, changes, expected):
        with pytest.raises(UserError) as refusal:
            parse_drafter({**FLAT_DRAFTER, **changes}, "drafts/x/config.json")
        assert str(refusal.value).startswith("drafts/x/config.json: ")
        assert expected in str(refusal.value)


class TestRenderDrafter:
    PLAIN = parse_drafter(FLAT_DRAFTER, "here")
    VARIANTS = (
        PLAIN,
        replace(PLAIN, layer_types=(SLIDING,) * 4 + (FULL,), sliding_window=2048),
        replace(PLAIN, layer_types=(SLIDING,) * 5, sliding_window=64, is_causal=False),
        replace(PLAIN, is_causal=True),
        replace(PLAIN, final_logit_softcapping=30.0, output_multiplier=0.25, input_embedding_scale=50.6),
        replace(PLAIN, rope=Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))),
        replace(PLAIN, target_hidden_size=4096, tie_word_embeddings=True),
    )

    @pytest.mark.parametrize("arch", VARIANTS)
    def test_a_written_config_reads_back(self, arch):
        assert parse_drafter(render_drafter(arch), "here") == arch

    @pytest.mark.parametrize("unread", [["rope_scaling", "rope_theta"], ["rope_parameters"]], ids=["new", "old"])
    def test_old_and_new_readers_find_the_rotary_scaling(self, unread):
        arch = replace(self.PLAIN, rope=Rope(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)))
        config = {key: value for key, value in render_drafter(arch).items() if key not in unread}
        assert parse_drafter(config, "here") == arch

    def test_every_field_of_the_published_config_is_written(self):
        rendered = render_drafter(self.PLAIN)
        for key, value in FLAT_DRAFTER.items():
            if key != "dflash_config":
                assert rendered[key] == value, key

    def test_the_dflash_fields_stand_where_each_server_looks(self):
        """Old readers look at the top level, new ones in dflash_config and rope_parameters."""
        rendered = render_drafter(self.PLAIN)
        own = {"block_size": 16, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
        assert rendered["dflash_config"] == own
        assert {key: rendered[key] for key in own} == own
        assert rendered["rope_theta"] == rendered["rope_parameters"]["rope_theta"] == 1e6


class TestResolveDrafter:
    def test_what_the_recipe_leaves_out_comes_from_the_target(self):
        target = parse_target(QWEN3_4B, "here")
        drafter = resolve_drafter(DrafterSection(mask_token_id=151669), target)
        assert drafter == replace(parse_drafter(FLAT_DRAFTER, "here"), tie_word_embeddings=True)

    def test_what_the_recipe_gives_counts(self):
        section = DrafterSection(
            mask_token_id=1,
            layers=1,
            block_size=4,
            target_layer_ids=(0, 3),
            intermediate_size=20,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=10,
        )
        drafter = resolve_drafter(section, tiny_target())
        assert (drafter.num_layers, drafter.block_size, drafter.target_layer_ids) == (1, 4, (0, 3))
        assert (drafter.num_heads, drafter.num_kv_heads, drafter.head_dim) == (6, 3, 10)
        assert drafter.intermediate_size == 20

    def test_the_number_of_taps_is_free(self):
        drafter = resolve_drafter(DrafterSection(mask_token_id=1, taps=3), tiny_target(num_layers=8))
        assert drafter.target_layer_ids == (1, 3, 5)

    def test_too_many_taps_for_a_small_target(self):
        with pytest.raises(UserError, match=r"target_layer_ids .* must rise strictly; list them by hand"):
            resolve_drafter(DrafterSection(mask_token_id=1), tiny_target(num_layers=4))


class TestCheckPair:
    TARGET = tiny_target()

    def test_a_fitting_pair_passes(self):
        check_pair(tiny_drafter(self.TARGET), self.TARGET, "drafter")

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"mask_token_id": 64}, "mask_token_id 64 is outside the target's 64 embedding rows"),
            ({"mask_token_id": -1}, "mask_token_id -1 is outside"),
            ({"target_layer_ids": (2, 1)}, "target_layer_ids [2, 1] must rise strictly"),
            ({"target_layer_ids": (1, 1)}, "target_layer_ids [1, 1] must rise strictly"),
            ({"target_layer_ids": (1, 4)}, "target_layer_ids [1, 4] leave the target's layers 0..3"),
            ({"target_layer_ids": (-1, 2)}, "target_layer_ids [-1, 2] leave the target's layers 0..3"),
            ({"target_layer_ids": ()}, "target_layer_ids"),
            ({"hidden_size": 64}, "hidden_size is 64 but the target's is 32; this drafter is of another target"),
            ({"target_hidden_size": 64}, "target_hidden_size is 64 but the target's is 32"),
            ({"vocab_size": 128}, "vocab_size is 128 but the target's is 64"),
            ({"num_target_layers": 12}, "num_target_layers is 12 but the target's is 4"),
            ({"num_heads": 3}, "3 attention heads are no multiple of 2 key-value heads"),
            ({"head_dim": 7}, "head_dim 7 is odd"),
        ],
    )
    def test_refusals_name_the_drafter_and_both_values(self, changes, expected):
        with pytest.raises(UserError) as refusal:
            check_pair(tiny_drafter(self.TARGET, **changes), self.TARGET, "drafts/x")
        assert str(refusal.value).startswith("drafts/x: ")
        assert expected in str(refusal.value)


class TestCheckMesh:
    TARGET = tiny_target()

    @staticmethod
    def mesh(fsdp=1, tensor=1):
        return {"data": 1, "fsdp": fsdp, "tensor": tensor}

    @pytest.mark.parametrize("mesh", [(1, 1), (2, 2), (4, 2), (8, 1)])
    def test_dividing_meshes_pass(self, mesh):
        check_mesh(self.TARGET, tiny_drafter(self.TARGET), self.mesh(*mesh))

    @pytest.mark.parametrize(
        ("target", "drafter", "mesh", "expected"),
        [
            ({}, {}, (1, 4), "devices.tensor: 4 does not divide the target's num_key_value_heads 2"),
            ({"num_heads": 6, "num_kv_heads": 6}, {}, (1, 4), "4 does not divide the target's num_attention_heads 6"),
            ({"intermediate_size": 49}, {}, (1, 2), "2 does not divide the target's intermediate_size 49"),
            ({"hidden_size": 36}, {}, (8, 1), "devices.fsdp: 8 does not divide the target's hidden_size 36"),
            ({"vocab_size": 66}, {}, (2, 2), "fsdp x tensor = 4 does not divide the target's vocab_size 66"),
            ({}, {"num_kv_heads": 1}, (1, 2), "2 does not divide the drafter's num_key_value_heads 1"),
        ],
    )
    def test_refusals_name_the_model_and_the_size(self, target, drafter, mesh, expected):
        arch = tiny_target(**target)
        with pytest.raises(UserError) as refusal:
            check_mesh(arch, tiny_drafter(arch, **drafter), self.mesh(*mesh))
        assert expected in str(refusal.value)

    def test_without_a_drafter_the_target_alone_counts(self):
        check_mesh(self.TARGET, None, self.mesh(2, 2))
        with pytest.raises(UserError, match="the target's num_key_value_heads 2"):
            check_mesh(self.TARGET, None, self.mesh(1, 4))


class TestParameterCount:
    def test_qwen3_4b(self):
        _, specs = weights.split(Drafter(parse_drafter(FLAT_DRAFTER, "here")))
        assert weights.count(specs) == 537_427_200

    def test_qwen3_8b(self):
        config = {**FLAT_DRAFTER, "hidden_size": 4096, "intermediate_size": 12288}
        _, specs = weights.split(Drafter(parse_drafter(config, "here")))
        assert weights.count(specs) == 1_048_626_432
