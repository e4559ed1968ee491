"""Text to Megatron's indexed dataset and back, and the order of the batches."""

import pytest
import torch

from mok_megatron.training.data import (
    END_OF_DOCUMENT,
    VOCABULARY,
    DataError,
    batches,
    build_dataset,
    byte_tokenizer,
    read_documents,
    standard_library_text,
    write_indexed_dataset,
)


def test_documents_survive_the_round_trip(tmp_path):
    documents = ["plain text\n", "", "Größe, 大きさ, \U0001f431", "x" * 5000]
    tokens = write_indexed_dataset(documents, tmp_path / "sub" / "set")
    assert tokens == sum(len(text.encode()) + 1 for text in documents)
    assert read_documents(tmp_path / "sub" / "set") == documents


def test_the_standard_library_has_enough_english():
    documents = standard_library_text()
    assert len(documents) > 50 and sum(map(len, documents)) > 300_000
    assert all(max(text.encode()) < END_OF_DOCUMENT for text in documents)


def test_tokenizer_agrees_with_what_is_written():
    tokenizer = byte_tokenizer()
    assert tokenizer.eod == END_OF_DOCUMENT and tokenizer.vocab_size == VOCABULARY
    assert tokenizer.tokenize("aé") == list("aé".encode())


def test_a_missing_dataset_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.bin and .*absent\.idx must exist"):
        build_dataset(tmp_path / "absent", 8, 4, 1, tmp_path)
    (tmp_path / "half.bin").touch()
    with pytest.raises(DataError, match="half"):
        read_documents(tmp_path / "half")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write the dataset"):
        write_indexed_dataset(["text"], tmp_path / "file" / "set")


def test_no_documents_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no documents"):
        write_indexed_dataset([], tmp_path / "set")


class Numbers(torch.utils.data.Dataset):
    """Sample ``i`` is the number ``i``."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return {"tokens": torch.tensor(index)}


@pytest.mark.parametrize("first", [0, 8])
def test_batches_share_the_samples_out_in_order(first):
    per_rank = [[b["tokens"].tolist() for b in batches(Numbers(), first, 2, rank, 2)] for rank in range(2)]
    steps = [left + right for left, right in zip(*per_rank, strict=True)]
    assert steps == [[n, n + 1, n + 2, n + 3] for n in range(first, 20, 4)]


def test_samples_are_the_text_shifted_by_one(tmp_path):
    """One rank of a gloo group of its own, because Megatron's builder is collective."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        text = "".join(chr(97 + i % 26) for i in range(999))
        write_indexed_dataset([text], tmp_path / "set")
        dataset = build_dataset(tmp_path / "set", 16, 100, seed=3, cache=tmp_path / "cache")
        again = build_dataset(tmp_path / "set", 16, 100, seed=3, cache=tmp_path / "cache2")
        assert len(dataset) >= 100
        for index in (0, 1, 99):
            sample = dataset[index]
            assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
            assert torch.equal(sample["tokens"], again[index]["tokens"])
            assert bytes(sample["tokens"][sample["tokens"] < 256].tolist()).decode()[:4] in text * 2 + text
    finally:
        torch.distributed.destroy_process_group()
