"""Questions from every source arrive whole, checked and split, as the same bytes."""

import json
import shutil
import sys
import time
from fractions import Fraction
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from fake_hub import COMMIT, NAME, Hub, ModelScope, run
from test_prepare_model import tiny_model

from scripts.prepare.data import prepare, split_validation
from scripts.prepared import DataError, decimal_text, read_rows

REAL = Path(__file__).parents[1].parent / "shared" / "gsm8k"
FILES = ("train.jsonl", "validation.jsonl", "test.jsonl")


def question(number: int, gold: str | None = None) -> dict[str, str]:
    """A row in GSM8K's form, with what its files hold: several lines, Chinese, quotes, unusual line separators."""
    text = f'Ann says "{number}"\u2028and 小明 adds {number} more.\nHow many?'
    return {
        "question": text,
        "answer": f"{number}+{number} = <<{number}+{number}={2 * number}>>\n#### {gold or 2 * number}",
    }


TRAIN = [question(number) for number in range(40)] + [question(600, "1,200"), question(7000, "-3")]
TEST = [question(number) for number in range(100, 110)]


def settings(folder: Path | str, **changed) -> dict:
    local = {"source": "local", "name": str(folder), "revision": None, "expected_rows": None}
    return {**local, "validation_rows": 10, "seed": 0, **changed}


def jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(rows: list[dict]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def source(tmp_path) -> Path:
    """A folder with the official JSONL files."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "train.jsonl").write_text(jsonl(TRAIN))
    (folder / "test.jsonl").write_text(jsonl(TEST))
    return folder


def written(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


# What is written


def test_rows_keep_text_and_place_and_get_the_gold_as_a_plain_number(source, tmp_path):
    record = prepare(settings(source), tmp_path / "out")
    rows = {name: read_rows(tmp_path / "out" / name) for name in FILES}
    assert [len(rows[name]) for name in FILES] == [32, 10, 10]
    assert record["counts"] == {"train": 32, "validation": 10, "test": 10}
    golds = {row["id"]: row["gold"] for name in FILES for row in rows[name]}
    assert golds["train-00012"] == "24" and golds["train-00040"] == "1200" and golds["train-00041"] == "-3"
    for name in FILES:
        for row in rows[name]:
            split, index = row["id"].split("-")
            original = {"train": TRAIN, "test": TEST}[split][int(index)]
            assert {key: row[key] for key in original} == original
    assert "小明" in (tmp_path / "out/test.jsonl").read_text(encoding="utf-8"), "readable as it is"
    assert not list((tmp_path / "out").glob(".*"))


def test_parquet_and_jsonl_from_everywhere_give_the_same_bytes(source, tmp_path):
    prepare(settings(source), tmp_path / "jsonl")
    expected = written(tmp_path / "jsonl")
    files = {
        "main/train-00000-of-00002.parquet": parquet(TRAIN[:30]),
        "main/train-00001-of-00002.parquet": parquet(TRAIN[30:]),
        "main/test-00000-of-00001.parquet": parquet(TEST),
        "socratic/train-00000-of-00001.parquet": parquet(TEST),
        "README.md": b"hello",
    }
    with Hub(files, kind="dataset") as hub:
        from_hub = settings(NAME, source="hub", revision=COMMIT)
        code, said = run("data", tmp_path, from_hub, HF_ENDPOINT=hub.url)
        assert code == 0 and "train 32, validation 10, test 10" in said, said
        assert len(hub.ranges) == 3, "the other configuration is not downloaded"
    assert written(tmp_path / "out") == expected
    shutil.rmtree(tmp_path / "out")
    code, said = run("data", tmp_path, from_hub, HF_ENDPOINT=hub.url)
    assert code == 0 and "using the copy in the cache" in said and written(tmp_path / "out") == expected
    (cached,) = (tmp_path / "hf").rglob("test-00000-of-00001.parquet")
    cached.resolve().write_bytes(parquet(TEST[1:]))
    code, said = run("data", tmp_path, from_hub, HF_ENDPOINT=hub.url)
    assert code == 1 and "main/test-00000-of-00001.parquet is damaged" in said

    for layout in ("{}", "{}-00000-of-00001", "data/{}-00000-of-00001", "main/{}-00000-of-00001"):
        for split, rows in (("train", TRAIN), ("test", TEST)):
            path = tmp_path / "local" / (layout.format(split) + ".parquet")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(parquet(rows))
        prepare(settings(tmp_path / "local"), tmp_path / "from_local")
        assert written(tmp_path / "from_local") == expected
        shutil.rmtree(tmp_path / "local")


def test_questions_come_from_modelscope(source, tmp_path):
    pytest.importorskip("modelscope")
    prepare(settings(source), tmp_path / "jsonl")
    files = {
        f"main/{split}-00000-of-00001.parquet": parquet(rows) for split, rows in (("train", TRAIN), ("test", TEST))
    }
    with ModelScope({**files, "socratic/train.parquet": b"other"}, kind="dataset") as server:
        from_modelscope = settings(NAME, source="modelscope")
        code, said = run("data", tmp_path, from_modelscope, MODELSCOPE_ENDPOINT=server.url)
    assert code == 0, said
    assert written(tmp_path / "out") == written(tmp_path / "jsonl")


def test_modelscope_that_is_not_installed_is_said_with_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(Exception, match="pip install modelscope"):
        prepare(settings(NAME, source="modelscope"), tmp_path / "out")


def test_built_in_problems_are_prepared_like_any_other(tmp_path):
    builtin = settings("demo", source="builtin", train_rows=200, test_rows=50, validation_rows=20)
    record = prepare(builtin, tmp_path / "out")
    assert record["counts"] == {"train": 180, "validation": 20, "test": 50}
    again = prepare(builtin, tmp_path / "again")
    other = prepare({**builtin, "seed": 1}, tmp_path / "other")
    assert record["digest"] == again["digest"] != other["digest"]


def test_a_file_with_a_byte_order_mark_and_windows_lines_is_read(source, tmp_path):
    prepare(settings(source), tmp_path / "out")
    content = (source / "train.jsonl").read_bytes()
    (source / "train.jsonl").write_bytes(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n") + b"\n\n")
    prepare(settings(source), tmp_path / "windows")
    assert written(tmp_path / "windows") == written(tmp_path / "out")


@pytest.mark.parametrize(
    "value, text",
    [("1200", "1200"), ("-3", "-3"), ("1/4", "0.25"), ("-5/2", "-2.5"), ("0", "0"), ("1000000", "1000000")],
)
def test_numbers_have_one_form(value, text):
    assert decimal_text(Fraction(value)) == text


def test_a_number_without_decimal_form_is_no_gold():
    with pytest.raises(ValueError, match="1/3"):
        decimal_text(Fraction(1, 3))


# The validation split


def test_validation_is_disjoint_stable_and_depends_on_the_seed(source, tmp_path):
    ids = {}
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        prepare(settings(source, seed=seed), tmp_path / name)
        ids[name] = {row["id"] for row in read_rows(tmp_path / name / "validation.jsonl")}
        train = {row["id"] for row in read_rows(tmp_path / name / "train.jsonl")}
        assert not ids[name] & train and len(ids[name] | train) == len(TRAIN)
    assert ids["first"] == ids["again"] != ids["other"]


def test_a_larger_validation_set_contains_the_smaller_and_seed_0_stays_what_it_is():
    rows = [{"id": f"train-{number:05d}", "question": str(number)} for number in range(1000)]
    chosen = [{row["id"] for row in split_validation(rows, [], count, seed=0)[1]} for count in (5, 50)]
    assert chosen[0] < chosen[1]
    assert chosen[0] == {"train-00215", "train-00828", "train-00434", "train-00992", "train-00407"}


@pytest.mark.parametrize("rows", [-1, 42, 1000])
def test_a_validation_set_that_leaves_no_train_rows_is_refused(source, tmp_path, rows):
    with pytest.raises(DataError, match=f"validation_rows: {rows} rows cannot be taken from 42"):
        prepare(settings(source, validation_rows=rows), tmp_path / "out")


# Faults


def test_every_fault_is_named_with_file_and_line_and_nothing_is_written(source, tmp_path):
    lines = jsonl(TRAIN).splitlines()
    lines[2] = lines[2][:25]
    lines[4] = json.dumps({"question": "How many?"})
    lines[5] = json.dumps({"question": " ", "answer": "#### 3"})
    lines[6] = json.dumps({"question": "How many?", "answer": "none at all"})
    lines[8] = json.dumps({"question": "How many?", "answer": "some\n#### many"})
    lines[9] = "[1, 2]"
    lines[10] = json.dumps({"question": 5, "answer": "#### 3"})
    (source / "train.jsonl").write_text("\n".join(lines))
    (source / "test.jsonl").write_bytes(jsonl(TEST).encode() + b'{"question": "\xff", "answer": "#### 1"}\n')
    with pytest.raises(DataError) as error:
        prepare(settings(source), tmp_path / "out")
    said = str(error.value)
    for fault in (
        "train.jsonl, line 3: no JSON",
        "train.jsonl, line 5: answer is missing",
        "train.jsonl, line 6: question is empty",
        "train.jsonl, line 7: answer has no '####'",
        "train.jsonl, line 9: the result behind '####' is no number",
        "train.jsonl, line 10: no JSON object",
        "train.jsonl, line 11: question is no text",
        "test.jsonl, line 11: no JSON",
    ):
        assert fault in said
    assert "'many'" in said or "' many'" in said
    assert not (tmp_path / "out").exists()


def test_rows_in_another_form_are_told_what_they_have_instead(source, tmp_path):
    (source / "test.jsonl").write_text(jsonl([{"question": "How many?", "solution": "#### 3", "level": 1}, {}]))
    with pytest.raises(DataError) as error:
        prepare(settings(source), tmp_path / "out")
    assert "line 1: answer is missing; the row has question, solution, level" in str(error.value)
    assert "line 2: question is missing; the row has nothing" in str(error.value)


def test_text_that_no_file_could_hold_and_rows_nested_without_end_are_named(source, tmp_path):
    bad = {"question": "How many \ud800?", "answer": "#### 3"}  # half of a pair, as a cut in the middle leaves it
    (source / "test.jsonl").write_text(jsonl(TEST) + json.dumps(bad) + "\n" + 100_000 * "[" + "\n")
    with pytest.raises(DataError) as error:
        prepare(settings(source), tmp_path / "out")
    assert r"test.jsonl, line 11: question holds half a character (\ud800 to \udfff)" in str(error.value)
    assert "test.jsonl, line 12: no JSON" in str(error.value)


def test_a_split_without_rows_is_named(source, tmp_path):
    (source / "test.jsonl").write_text("\n")
    with pytest.raises(DataError, match="test without any row"):
        prepare(settings(source), tmp_path / "out")


@pytest.mark.parametrize("stage", ["data", "model"])
def test_a_folder_that_cannot_be_written_is_named(source, tmp_path, stage):
    (tmp_path / "out").write_text("a file stands where the folder should")
    for name, content in tiny_model().items():
        (source / name).write_bytes(content)
    code, said = run(stage, tmp_path, settings(source))
    assert code == 1 and f"error: {tmp_path}/out could not be written: " in said


def test_many_faults_are_shown_up_to_ten(source, tmp_path):
    (source / "train.jsonl").write_text("damaged\n" * 25)
    with pytest.raises(DataError, match=r"25 rows cannot be used(?s:.*)line 10: (?s:.*)and 15 more$"):
        prepare(settings(source), tmp_path / "out")


def test_a_parquet_file_that_was_cut_or_lacks_a_column_is_named(source, tmp_path):
    (source / "train.jsonl").unlink()
    (source / "train.parquet").write_bytes(parquet(TRAIN)[:-20])
    with pytest.raises(DataError, match=r"train\.parquet cannot be read as parquet"):
        prepare(settings(source), tmp_path / "out")
    (source / "train.parquet").write_bytes(parquet([{"question": "How many?"}]))
    with pytest.raises(DataError, match=r"train\.parquet, row 1: answer is missing"):
        prepare(settings(source), tmp_path / "out")


def test_a_folder_without_a_split_says_what_was_looked_for(source, tmp_path):
    (source / "test.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no test split; looked for test\.jsonl, main/test-\*\.parquet"):
        prepare(settings(source), tmp_path / "out")


def test_wrong_row_counts_are_refused(source, tmp_path):
    with pytest.raises(DataError, match="train has 42 rows, not 7,473; test has 10 rows, not 1,319"):
        prepare(settings(source, expected_rows={"train": 7473, "test": 1319}), tmp_path / "out")
    prepare(settings(source, expected_rows={"train": 42, "test": 10}), tmp_path / "out")


def test_repeated_questions_are_kept_said_and_never_on_both_sides(source, tmp_path, capsys):
    (source / "train.jsonl").write_text(jsonl([*TRAIN, TRAIN[3], TRAIN[3], TEST[0]]))
    record = prepare(settings(source, validation_rows=40), tmp_path / "out")
    assert record["duplicates"] == {"train": 2, "test": 0, "test_in_train": 1}
    assert sum(record["counts"].values()) == 45 + 10
    said = capsys.readouterr().out
    assert "2 questions within train" in said and "1 test questions stand in train too" in said
    validation = {row["question"] for row in read_rows(tmp_path / "out/validation.jsonl")}
    kept = [row["question"] for row in read_rows(tmp_path / "out/train.jsonl")]
    assert not validation & set(kept) and kept.count(TRAIN[3]["question"]) == 3


def test_a_fault_ends_the_command_with_a_message_and_code_1(source, tmp_path):
    (source / "test.jsonl").write_text("{\n")
    code, said = run("data", tmp_path, settings(source))
    assert code == 1 and "test.jsonl, line 1" in said


def test_a_damaged_prepared_file_is_named_with_line_and_way_out(source, tmp_path):
    prepare(settings(source), tmp_path / "out")
    path = tmp_path / "out/train.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=rf"train\.jsonl, line 32: no JSON(?s:.*)Remove {tmp_path}/out"):
        read_rows(path)
    with pytest.raises(DataError, match=r"nothing\.jsonl cannot be read"):
        read_rows(tmp_path / "nothing.jsonl")


# The real thing


@pytest.mark.skipif(not REAL.exists(), reason="the official GSM8K files are not here")
def test_the_official_gsm8k_is_prepared_in_full(tmp_path):
    started = time.monotonic()
    expected = {"train": 7473, "test": 1319}
    record = prepare(settings(REAL, validation_rows=200, expected_rows=expected), tmp_path / "out")
    assert time.monotonic() - started < 10
    assert record["counts"] == {"train": 7273, "validation": 200, "test": 1319}
    commas = {"train": 0, "test": 0}
    for name in FILES:
        for row in read_rows(tmp_path / "out" / name):
            tail = row["answer"].rpartition("####")[2].strip()
            assert row["gold"] == str(int(tail.replace(",", "")))
            commas[row["id"].split("-")[0]] += "," in tail
    assert commas == {"train": 79, "test": 14}
