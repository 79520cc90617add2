"""Types of settings that several families share, each with its meaning; the names of the settings are Transformers'."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from terakoya.toolkit.architectures._rope_scaling import RopeScaling

HiddenSize = Annotated[PositiveInt, Field(description="The width of the hidden states.")]
NumHiddenLayers = Annotated[PositiveInt, Field(description="Number of blocks.")]
NumAttentionHeads = Annotated[
    PositiveInt, Field(description="Number of attention heads of each block; `hidden_size` is a multiple of it.")
]
HeadDim = Annotated[PositiveInt, Field(description="The width of an attention head.")]
IntermediateSize = Annotated[PositiveInt, Field(description="The width of the middle of the feed-forward.")]
Activation = Annotated[
    str, Field(description="The activation function of the feed-forward, by its name in Transformers.")
]
HiddenDropout = Annotated[
    NonNegativeFloat, Field(description="The dropout probability of the embeddings and of each layer's output.")
]
AttentionDropout = Annotated[NonNegativeFloat, Field(description="The dropout probability of attention weights.")]
MaxPositionEmbeddings = Annotated[
    PositiveInt, Field(description="The longest row that the model can read. Unit: tokens.")
]
InitializerRange = Annotated[NonNegativeFloat, Field(description="The standard deviation of the initial weights.")]
NormEps = Annotated[
    NonNegativeFloat, Field(description="A small number that norms add to the variance, against division by zero.")
]
EmbeddingDropout = Annotated[NonNegativeFloat, Field(description="The dropout probability of the embeddings.")]
ResidualDropout = Annotated[NonNegativeFloat, Field(description="The dropout probability of each layer's output.")]
TieWordEmbeddings = Annotated[bool, Field(description="Whether the vocabulary head has the weights of the embeddings.")]
RopeTheta = Annotated[PositiveFloat, Field(description="The base of the rotary positions.")]
RopeScalingOrNone = Annotated[
    RopeScaling | None,
    Field(
        description="How rotary positions are slowed down, for rows longer than those that the model saw before; null: "
        "not at all."
    ),
]
NumKeyValueHeads = Annotated[
    PositiveInt | None,
    Field(
        description="Heads of keys and values, each shared by equally many neighbouring query heads; null is one for "
        "each."
    ),
]
InnerSize = Annotated[
    PositiveInt | None, Field(description="The width of the feed-forward layers; null is four times `hidden_size`.")
]
TypeVocabSize = Annotated[PositiveInt, Field(description="Number of segment types, each with an embedding.")]
ScaledInit = Annotated[
    bool,
    Field(
        description="Whether output layers are initialised smaller by sqrt(2 x layers), as in GPT-2 and Megatron-LM."
    ),
]
AttentionBias = Annotated[bool, Field(description="Whether the linear layers of attention have biases.")]
