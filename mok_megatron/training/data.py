"""Text to Megatron's indexed dataset, one token a byte, and back out as training batches."""

import pydoc_data.topics
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.tokenizers import MegatronTokenizer

from mok_megatron.errors import MokError

END_OF_DOCUMENT = 256  # bytes are 0..255
PADDING = 257
VOCABULARY = 258

Batch = dict[str, torch.Tensor]


class DataError(MokError):
    """The training data cannot be read or written."""


def byte_tokenizer() -> MegatronTokenizer:
    """Megatron's own byte-level tokenizer: a byte is a token, then end of document and padding."""
    return MegatronTokenizer.from_pretrained(
        metadata_path={"library": "byte-level"}, vocab_size=VOCABULARY, _eos_id=END_OF_DOCUMENT, _pad_id=PADDING
    )


def standard_library_text() -> list[str]:
    """English text that every Python has: the help topics of ``pydoc``, one document a topic (490 KB in all)."""
    topics = pydoc_data.topics.topics
    return [topics[name] for name in sorted(topics)]


def standard_library_sources(most: int = 8_000_000) -> list[str]:
    """Text of some megabytes that every Python has: the help topics, then the sources of the standard library.

    Args:
        most: bytes, about: the document that reaches it is the last.
    """
    documents, size = standard_library_text(), 0
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        if {"site-packages", "test", "tests"} & set(path.relative_to(folder).parts):
            continue
        documents.append(path.read_text(encoding="utf-8", errors="replace"))
        size += path.stat().st_size
        if size >= most:
            break
    return documents


def write_indexed_dataset(documents: Iterable[str], prefix: Path) -> int:
    """Write ``prefix.bin`` and ``prefix.idx`` in Megatron's indexed format; returns the number of tokens.

    Each document becomes its UTF-8 bytes and an end-of-document token, as uint16.

    Raises:
        DataError: there is no text, or the folder cannot be written.
    """
    tokens = 0
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
        for document in documents:
            ids = numpy.frombuffer(document.encode(), dtype=numpy.uint8).astype(numpy.uint16)
            ids = numpy.append(ids, numpy.uint16(END_OF_DOCUMENT))
            builder.add_document(torch.from_numpy(ids), [ids.size])
            tokens += ids.size
        builder.finalize(f"{prefix}.idx")
    except OSError as error:
        raise DataError(f"cannot write the dataset {prefix}.bin/.idx: {error}. Choose another folder.") from error
    if tokens == 0:
        raise DataError(f"no documents were given for the dataset {prefix}; give at least one text")
    return tokens


def read_documents(prefix: Path) -> list[str]:
    """The documents of a dataset that :func:`write_indexed_dataset` wrote."""
    _require(prefix)
    dataset = IndexedDataset(str(prefix))
    return [bytes(dataset[i][:-1].astype(numpy.uint8)).decode() for i in range(len(dataset))]


def build_dataset(prefix: Path, sequence_length: int, samples: int, seed: int, cache: Path) -> GPTDataset:
    """Megatron's GPT dataset over ``prefix``: shuffled samples of ``sequence_length`` tokens and their labels.

    Collective: every rank of the default process group calls it with the same arguments.

    Args:
        prefix: path of the ``.bin`` and ``.idx`` files without their suffix.
        sequence_length: tokens a sample.
        samples: samples to serve; the text is repeated (reshuffled) as often as that takes.
        seed: of the shuffling.
        cache: folder for Megatron's sample indices.

    Raises:
        DataError: the dataset's files do not exist.
    """
    _require(prefix)
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=str(cache),
        tokenizer=byte_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # the causal mask comes from the attention layer
    )
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()
    return train


def batches(dataset: GPTDataset, first_sample: int, micro_batch: int, rank: int, ranks: int) -> Iterator[Batch]:
    """Micro-batches of one data-parallel rank, in order, from ``first_sample`` on (of the whole group).

    Yields:
        ``tokens``, ``labels``, ``position_ids`` [micro_batch, sequence_length] int64, ``loss_mask`` fp32.
    """
    for start in range(first_sample, len(dataset) - micro_batch * ranks + 1, micro_batch * ranks):
        mine = range(start + rank * micro_batch, start + (rank + 1) * micro_batch)
        yield torch.utils.data.default_collate([dataset[i] for i in mine])


def _require(prefix: Path) -> None:
    if not IndexedDataset.exists(str(prefix)):
        raise DataError(
            f"no dataset at {prefix}: both {prefix}.bin and {prefix}.idx must exist. Give the path without a suffix."
        )
