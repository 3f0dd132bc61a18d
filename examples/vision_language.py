# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""For example 06: an encoder of images and captions, its batch, and megatron-core's LLaVA.

An image takes one position per patch. The batch is a PackedBatch with additional images, so loss,
report and checkpoints are the same as for text.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.multimodal_projector import MultimodalProjector
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.energon import (
    Cooker,
    Sample,
    SampleDecoder,
    TaskEncoder,
    basic_sample_keys,
    stateless,
)
from megatron.energon.edataclass import edataclass

from energon_ext import DynamicBlendMixin, PackedBatch, load_tokenizer
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.megatron import (
    build_packed_seq_params,
    get_batch,
    gpt_layer_spec,
    make_loss_func,
)
from energon_ext.megatron.attention import TorchNorm
from energon_ext.plan.cost import AttentionCost, VisionCost

SIDE, PATCH = 32, 8
PATCHES = (SIDE // PATCH) ** 2
IMAGE_FORMATS = ("png", "webp", "jpeg")


# Samples ----------------------------------------------------------------------------------------


@edataclass
class Captioned(Sample):
    """Images as float [3, height, width] in 0..1, and a caption."""

    images: list[torch.Tensor]
    text: str


@edataclass
class Encoded(Sample):
    """Token ids with PATCHES placeholders per image, int64 [n], and the images."""

    tokens: np.ndarray
    weights: np.ndarray
    images: list[torch.Tensor]


@dataclass
class ImageRow:
    """A row with its images, float [images, 3, SIDE, SIDE]."""

    row: Row
    images: torch.Tensor


@dataclass
class ImageBatch(PackedBatch):
    """A PackedBatch with its images, in the order of their placeholders."""

    whole_fields = ("images",)

    images: torch.Tensor | None = None


@stateless
def cook_images(sample: dict[str, Any]) -> Captioned:
    names = sorted(name for name in sample if name.split(".")[-1] in IMAGE_FORMATS)
    images = [sample[name] for name in names]
    return Captioned(**basic_sample_keys(sample), images=images, text=sample["txt"])


class ImageTextEncoder(DynamicBlendMixin, TaskEncoder):
    """Encodes images and then their caption; packs whole samples into rows, also token files.

    Args:
        tokenizer: tokenizer of the captions and the token files.
        seq_len: positions per row.
        costs: costs of tokens and images, to balance the rows of a step by cost.
    """

    cookers = [Cooker(cook_images, has_subflavors={"images": True})]
    decoder = SampleDecoder(image_decode="torchrgb")

    @property
    def encoding_fingerprint(self) -> dict[str, Any]:
        cost = None if self._vision_cost is None else vars(self._vision_cost)
        return {"version": 1, "patches": PATCHES, "cost": cost}

    def __init__(
        self, tokenizer: Any, seq_len: int, costs: tuple[AttentionCost, VisionCost] | None = None
    ):
        self.tokenizer, self.seq_len = tokenizer, seq_len
        self.image_id = tokenizer.vocab_size  # never occurs in text
        self.cost, self._vision_cost = costs or (None, None)
        self._assemble = BatchAssembler(seq_len, pad_id=tokenizer.pad_id)

    def sample_length(self, sample: Captioned) -> tuple[int, float]:
        """Return the tokens of a sample and the cost of its images, without resizing them."""
        images = len(sample.images)
        tokens = images * PATCHES + len(self.tokenizer.encode_array(sample.text))
        if self._vision_cost is None:
            return tokens, 0.0
        return tokens, float(self._vision_cost(np.full(images, PATCHES)).sum())

    def length_of(self, sample: Encoded) -> int:
        return len(sample.tokens)

    @stateless
    def encode_sample(self, sample: Captioned) -> Encoded:
        placeholders = np.full(len(sample.images) * PATCHES, self.image_id)
        text = self.tokenizer.encode_array(sample.text)
        return Encoded.derive_from(
            sample,
            tokens=np.concatenate([placeholders, text]),
            weights=np.concatenate([np.zeros(len(placeholders)), np.ones(len(text))]),
            images=[_resized(image) for image in sample.images],
        )

    @stateless
    def pack_selected_samples(self, samples: list[Encoded]) -> ImageRow:
        row = Row(
            [sample.tokens for sample in samples],
            source=self.source_key,
            documents=len(samples),
            label_weights=[sample.weights for sample in samples],
        )
        return ImageRow(row, _stacked([image for sample in samples for image in sample.images]))

    def pack_tokens(self, row: Row) -> ImageRow:
        return ImageRow(row, _stacked([]))

    def make_padding(self, row: ImageRow) -> ImageRow:
        """Complete the last batches of validation by rows without tokens and images."""
        return ImageRow(Row([], slice_sources=[]), _stacked([]))

    @stateless
    def batch(self, rows: list[ImageRow]) -> ImageBatch:
        batch = self._assemble([row.row for row in rows], self.source_keys)
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        return ImageBatch(**fields, images=torch.cat([row.images for row in rows]))


def encoder() -> ImageTextEncoder:
    """Return an encoder for ``energon-ext peek mix.yaml --encoder vision_language:encoder``."""
    return ImageTextEncoder(load_tokenizer("bytes"), seq_len=256)


def _resized(image: torch.Tensor) -> torch.Tensor:
    image = torch.nn.functional.interpolate(image[None], (SIDE, SIDE), mode="area")[0]
    return (image - 0.5) / 0.25


def _stacked(images: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(images) if images else torch.zeros(0, 3, SIDE, SIDE)


# Model ------------------------------------------------------------------------------------------


def vision_configs(config: TransformerConfig) -> tuple[TransformerConfig, TransformerConfig]:
    """Return configs of the vision encoder and its projection for one of the language model.

    Both are on the first pipeline stage.
    """
    vision = dataclasses.replace(
        config,
        pipeline_model_parallel_size=1,
        hidden_size=config.hidden_size // 2,
        ffn_hidden_size=config.hidden_size,
        kv_channels=None,
        num_query_groups=None,
        normalization="LayerNorm",
    )
    vision.vision_model_type = "clip"
    return vision, dataclasses.replace(config, num_layers=1)


def build_llava(
    config: TransformerConfig, vocab_size: int, positions: int, image_id: int
) -> LLaVAModel:
    """Build megatron-core's LLaVA, with a vision encoder of half the width.

    LLaVAModel only builds vision encoders with norms of Transformer Engine or Apex, so they are
    built here.

    Args:
        positions: of every micro-batch; pipeline stages exchange this many.
    """
    vision, projection = vision_configs(config)
    layers = get_vit_layer_with_local_spec()
    layers.submodules.input_layernorm = layers.submodules.pre_mlp_layernorm = TorchNorm
    # Patches attend to their whole image.
    layers.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.no_mask
    mlp = MLPSubmodules(
        linear_fc1=tensor_parallel.ColumnParallelLinear,
        linear_fc2=tensor_parallel.RowParallelLinear,
    )
    image = {"img_h": SIDE, "img_w": SIDE, "patch_dim": PATCH}
    model = LLaVAModel(
        language_transformer_config=config,
        language_transformer_layer_spec=gpt_layer_spec(config),
        language_vocab_size=vocab_size,
        language_max_sequence_length=positions,
        language_position_embedding_type="rope",
        vision_transformer_config=vision,
        vision_transformer_layer_spec=layers,
        drop_vision_class_token=True,
        vision_projection_config=projection,
        vision_projection_layer_spec=mlp,
        image_token_index=image_id,
        add_encoder=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **image,
    )
    model.model_type = ModelType.encoder_or_decoder  # read by schedules of Megatron-core 0.16
    if not model.pre_process:
        return model
    model.vision_model = CLIPViTModel(
        vision, layers, ln_pre_impl=TorchNorm, ln_post_impl=TorchNorm, **image
    )
    model.vision_projection = MultimodalProjector(projection, mlp, "mlp", vision.hidden_size)
    model.add_encoder = model._drop_vision_class_token = True
    return model


def forward_step(data_iterator, model, *, image_id, weight_scale=1):
    """Run one micro-batch through LLaVA, as Megatron's schedules call it.

    LLaVA replaces one token per image by the image's patches, so other placeholders are removed.
    """
    batch = get_batch(data_iterator, batch_class=ImageBatch)
    loss_func = make_loss_func(batch, weight_scale=weight_scale)
    is_image = batch.tokens == image_id
    last_of_image = is_image & (is_image.cumsum(0) % PATCHES == 0)
    kept = ~is_image | last_of_image
    output, _ = model(
        batch.images,
        batch.tokens[kept][None],
        batch.position_ids[kept][None],
        None,  # no attention mask: the segments replace it
        labels=batch.labels[kept][None],
        loss_mask=batch.token_weights[kept][None],
        packed_seq_params=build_packed_seq_params(batch),
    )
    if not len(batch.images):
        # Without images nothing has a gradient here, but overlapped reductions wait for all.
        unused = [each.sum() for name, each in model.named_parameters() if "vision_" in name]
        output = output + 0 * sum(unused)
    return output, loss_func
