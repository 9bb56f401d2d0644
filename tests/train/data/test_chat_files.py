"""Files of conversations: what is a document, and rows that are none."""

import json
import sys

import orjson
import pytest

from penstock.errors import ConfigError
from penstock.train.data.chat_files import ChatFiles
from penstock.train.data.corpus import find_documents

USER, ANSWER = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}


def open_chats(*paths, column="messages", needs_assistant=True):
    return ChatFiles(find_documents(list(map(str, paths)), (".jsonl",)), column, needs_assistant=needs_assistant)


def conversations_of(chats):
    return [orjson.loads(b"".join(chats.pieces(index))) for index in range(len(chats))]


@pytest.fixture
def lines(tmp_path):
    """Write the lines of a file, each a text or what becomes JSON; return its path."""

    def write(*rows, name="a.jsonl"):
        texts = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(texts), encoding="utf-8")
        return tmp_path / name

    return write


def test_each_line_is_a_conversation_and_empty_ones_are_none(lines):
    first = lines({"messages": [USER, ANSWER], "id": 5}, "", "  ", {"messages": [ANSWER]})
    second = lines({"messages": [USER, {"role": "assistant", "content": "é"}]}, name="b.jsonl")

    chats = open_chats(first, second)

    assert conversations_of(chats) == [[USER, ANSWER], [ANSWER], [USER, {"role": "assistant", "content": "é"}]]
    assert [chats.name(index).rpartition("/")[2] for index in range(3)] == [
        "a.jsonl, line 1",
        "a.jsonl, line 4",
        "b.jsonl, line 1",
    ]
    assert chats.num_bytes == first.stat().st_size + second.stat().st_size


def test_a_column_of_another_name_is_read_where_it_is_named(lines):
    path = lines({"talk": [USER, ANSWER]})

    assert conversations_of(open_chats(path, column="talk")) == [[USER, ANSWER]]
    assert open_chats(path).stamp() != open_chats(path, column="talk").stamp()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"messages": [', r"a\.jsonl, line 2: is not JSON: .*\. Mend the line, or leave it out"),
        ("5", "line 2: is 5; expected an object with the key 'messages'"),
        ({"mesages": []}, "line 2: has no 'messages', but the keys 'mesages'. Did you mean 'mesages'"),
        ({}, "line 2: has no 'messages', but no keys. Name the column of messages in data.column"),
        ({"messages": "hello"}, "line 2: 'messages' is \"hello\"; expected a list of messages"),
        ({"messages": []}, r"line 2: 'messages' is \[\]; expected a list of messages"),
        ({"messages": ["hello"]}, "message 0 is \"hello\"; expected an object with the keys 'role' and 'content'"),
        (
            {"messages": [{"from": "human", "value": "hello"}]},
            "message 0 has no 'role', but the keys 'from', 'value'; expected 'role', such as 'user' or 'assistant'",
        ),
        ({"messages": [{"role": 5, "content": "hello"}]}, "message 0 has the role 5; expected 'role'"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 1 has the content null; expected a text"),
        ({"messages": [USER, {"role": "assistant", "content": 4}]}, "message 1 has the content 4; expected a text"),
        (
            {"messages": [{"role": "system", "content": ""}, USER]},
            "has no turn of the 'assistant', so that nothing is learned from it; its roles: 'system', 'user'. Leave it",
        ),
    ],
)
def test_a_row_that_is_no_conversation_is_named_with_its_line_and_what_was_expected(lines, row, problem):
    path = lines({"messages": [USER, ANSWER]}, row)

    with pytest.raises(ConfigError, match=problem) as caught:
        len(open_chats(path))
    assert caught.value.key == "data.files"


def test_all_such_rows_are_named_at_once_up_to_ten(lines):
    path = lines(*[{"messages": [USER]}] * 12, {"messages": [USER, ANSWER]}, "{")

    with pytest.raises(
        ConfigError, match=r"(?s)13 rows are no conversations:.*line 1:.*line 10:.*\.\.\. 13 in all"
    ) as caught:
        len(open_chats(path))
    assert len(str(caught.value).splitlines()) == 12


def test_nobody_needs_to_answer_where_all_is_learned_and_calls_of_tools_are_answers(lines):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}

    assert conversations_of(open_chats(lines({"messages": [USER]}), needs_assistant=False)) == [[USER]]
    assert conversations_of(open_chats(lines({"messages": [parts, call]}))) == [[parts, call]]


def test_a_file_that_changes_after_it_was_looked_at_is_named(lines):
    path = lines({"messages": [USER, ANSWER]})
    chats = open_chats(path)
    assert len(chats) == 1
    path.write_text("{")

    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: is not JSON"):
        list(chats.pieces(0))
    path.unlink()
    with pytest.raises(ConfigError, match=r"a\.jsonl: cannot be read: No such file"):
        list(chats.pieces(0))


def test_bytes_that_are_no_text_and_a_file_that_is_gone_are_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"messages": "\xff"}')
    chats = open_chats(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"line 1: is not JSON: .*UTF-8"):
        len(chats)

    chats = open_chats(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"a\.jsonl: cannot be read: No such file"):
        len(chats)


# ---- Parquet


def test_parquet_without_its_package_is_refused_with_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)

    with pytest.raises(
        ConfigError, match=r"a\.parquet: needs the pyarrow package .*pip install '\.\[datasets\]'.* as JSONL"
    ) as caught:
        len(open_chats(tmp_path / "a.parquet"))
    assert caught.value.key == "data.files"


@pytest.fixture
def table(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def write(**columns):
        parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    return write


def test_rows_of_parquet_are_the_conversations_that_lines_are(table, lines):
    call = {"role": "assistant", "content": "4", "tool_calls": [{"name": "add"}]}
    messages = [[USER, ANSWER], [USER, call]]

    chats = open_chats(table(messages=messages, id=[1, 2]))

    assert conversations_of(chats) == messages  # no key that other rows have
    plain = open_chats(lines(*[{"messages": conversation} for conversation in messages]))
    assert [list(chats.pieces(index)) for index in range(2)] == [list(plain.pieces(index)) for index in range(2)]
    assert chats.name(1).endswith("a.parquet, row 1")


def test_parquet_without_the_column_with_other_values_or_damaged_is_named(table, tmp_path):
    with pytest.raises(ConfigError, match=r"a\.parquet has no column 'messages'\..*Its columns: message, id") as caught:
        len(open_chats(table(message=[[USER, ANSWER]], id=[1])))
    assert caught.value.key == "data.column"
    with pytest.raises(ConfigError, match=r"a\.parquet, row 0: .* expected a list of messages"):
        len(open_chats(table(messages=["hello"])))
    with pytest.raises(ConfigError, match=r"a\.parquet, row 0: has what is no JSON: .*bytes"):
        len(open_chats(table(messages=[[ANSWER | {"data": b"\x00"}]])))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read as Parquet: .*Save it anew"):
        len(open_chats(tmp_path / "a.parquet"))
