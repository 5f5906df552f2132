"""Text assets: deterministic, without repeats, cut into rows that never overlap."""

import re

import pytest
import torch

from tl_tangent.assets import language_reference, read_text, split_disjoint, token_batches
from tl_tangent.errors import TangentFileError, TangentValueError


def codes(text: str) -> list[int]:
    """A tokenizer of one token a character."""
    return [ord(c) for c in text]


def test_language_reference_is_english_without_repeats():
    text = language_reference()
    paragraphs = text.split("\n\n")
    words = re.findall(r"[a-z]+", text.lower())
    assert len(text) > 200_000
    assert words.count("the") / len(words) > 0.05
    assert len(set(paragraphs)) == len(paragraphs)
    assert text == language_reference()


def test_language_reference_drops_markup_and_joins_wrapped_lines():
    text = language_reference()
    assert "::=" not in text
    assert not re.search(r"^[*=~-]{3,}$", text, flags=re.MULTILINE)
    assert "Assert statements are a convenient way to insert debugging assertions into a" in text
    assert "if __debug__:\n    if not expression" in text  # examples keep their lines


def test_read_text_returns_the_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffnaïve text\n".encode())
    assert read_text(path) == "naïve text\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"a\xffb", "not UTF-8 text .byte 1"),
    ],
)
def test_read_text_says_what_is_wrong(tmp_path, content, message):
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TangentFileError, match=message):
        read_text(path)


def test_read_text_refuses_a_folder(tmp_path):
    with pytest.raises(TangentFileError, match="cannot be read"):
        read_text(tmp_path)


def test_rows_are_the_text_in_order():
    rows = token_batches(codes, "abcdefghij", seq_len=3)
    assert rows.tolist() == [codes("abc"), codes("def"), codes("ghi")]
    assert rows.dtype == torch.int64


def test_n_tokens_counts_positions_and_rounds_up_to_rows():
    assert token_batches(codes, "abcdefghij", seq_len=3, n_tokens=6).shape == (2, 3)
    assert token_batches(codes, "abcdefghij", seq_len=3, n_tokens=7).shape == (3, 3)


def test_bos_stands_in_every_row_and_loses_no_text():
    rows = token_batches(codes, "abcdef", seq_len=4, bos=7)
    assert rows.tolist() == [[7, *codes("abc")], [7, *codes("def")]]


def test_encoding_a_prefix_gives_the_tokens_of_the_whole_text():
    text = "word " * 20_000
    few = token_batches(codes, text, seq_len=10, n_tokens=100)
    assert torch.equal(few, token_batches(codes, text, seq_len=10)[:10])


def test_long_tokens_fall_back_to_the_whole_text():
    def one_in_thousand(text):
        return list(range(len(text) // 1000))

    rows = token_batches(one_in_thousand, "x" * 100_000, seq_len=10, n_tokens=100)
    assert rows.flatten().tolist() == list(range(100))


def test_a_transformer_lens_model_is_asked_without_bos_and_untruncated():
    class Model:
        def to_tokens(self, text, *, prepend_bos, truncate):
            assert not prepend_bos and not truncate
            return torch.tensor([codes(text)])

    assert token_batches(Model(), "abcd", seq_len=2).tolist() == [codes("ab"), codes("cd")]


def test_a_tokenizer_is_asked_without_special_tokens():
    class Tokenizer:
        def convert_ids_to_tokens(self, ids): ...

        def __call__(self, text, *, add_special_tokens, verbose):
            assert not add_special_tokens and not verbose
            return {"input_ids": codes(text)}

    assert token_batches(Tokenizer(), "abcd", seq_len=2).tolist() == [codes("ab"), codes("cd")]


def test_too_short_a_text_states_both_numbers():
    with pytest.raises(TangentValueError, match="has 10 tokens; 12 are needed for 3 rows of 4"):
        token_batches(codes, "abcdefghij", seq_len=4, n_tokens=12)
    with pytest.raises(TangentValueError, match="has 3 tokens; 4 are needed for 1 rows"):
        token_batches(codes, "abc", seq_len=4)


@pytest.mark.parametrize("knobs", [{"seq_len": 0}, {"seq_len": 1, "bos": 3}])
def test_rows_without_text_are_refused(knobs):
    with pytest.raises(TangentValueError, match="no text token in a row"):
        token_batches(codes, "abc", **knobs)


def test_something_that_cannot_encode_is_named():
    with pytest.raises(TangentValueError, match="encode is a int"):
        token_batches(3, "abc", seq_len=1)


def test_split_is_disjoint_and_seeded():
    tokens = torch.arange(60).reshape(20, 3)
    fit, evaluation = split_disjoint(tokens, 12, 5, seed=1)
    assert fit.shape == (12, 3) and evaluation.shape == (5, 3)
    assert not set(fit.flatten().tolist()) & set(evaluation.flatten().tolist())
    again = split_disjoint(tokens, 12, 5, seed=1)
    assert torch.equal(fit, again[0]) and torch.equal(evaluation, again[1])
    assert not torch.equal(evaluation, split_disjoint(tokens, 12, 5, seed=2)[1])


def test_evaluation_rows_do_not_depend_on_how_much_is_fitted():
    tokens = torch.arange(60).reshape(20, 3)
    assert torch.equal(
        split_disjoint(tokens, 3, 5, seed=1)[1], split_disjoint(tokens, 15, 5, seed=1)[1]
    )


def test_split_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    split_disjoint(torch.zeros(4, 2, dtype=torch.int64), 2, 2, seed=0)
    assert torch.equal(state, torch.get_rng_state())


def test_split_states_how_many_tokens_there_are_and_are_needed():
    tokens = torch.zeros(10, 8, dtype=torch.int64)
    with pytest.raises(TangentValueError, match=r"has 80 tokens \(10 rows of 8\); 96 are needed"):
        split_disjoint(tokens, 8, 4, seed=0)
    with pytest.raises(TangentValueError, match="at least 1"):
        split_disjoint(tokens, 8, 0, seed=0)
