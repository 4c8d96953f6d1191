"""Formats of label files as other programs write them: each gives the right labels, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain.data.labels.label_columns import JOINED, LabelColumns
from raytrain.data.labels.label_file import read_label_file
from raytrain.errors import UsageError

LABELS = {"a b.jpg": "007", "c.jpg": "7", "d/e.png": "007"}
LISTS = {"a.jpg": ["cat", "hot dog"], "b.jpg": ["cat"], "c.jpg": list[str]()}


def read(tmp_path: Path, name: str, content: str | bytes, **columns: Any) -> dict[str, str]:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    table = read_label_file(str(tmp_path / name), LabelColumns(**columns))
    return dict(zip(table.keys, table.labels, strict=True))


def lines(rows: dict[str, str], between: str, header: str = "") -> str:
    return header + "".join(f"{key}{between}{label}\n" for key, label in rows.items())


@pytest.mark.parametrize("between", [" ", "\t", ",", ";", "   "])
@pytest.mark.parametrize("header", ["", "filename{}label\n", "Path{}class\n"])
def test_lists_with_and_without_header(between: str, header: str, tmp_path: Path) -> None:
    assert read(tmp_path, "val.txt", lines(LABELS, between, header.format(between))) == LABELS
    windows = lines(LABELS, between, header.format(between)).replace("\n", "\r\n")
    assert read(tmp_path, "val.txt", "\ufeff" + windows + "\r\n") == LABELS


def test_lists_whose_keys_have_no_suffix_and_those_that_begin_with_the_label(tmp_path: Path) -> None:
    assert read(tmp_path, "train.txt", "2008_000008  1\n2008_000015  0\n") == {"2008_000008": "1", "2008_000015": "0"}
    assert read(tmp_path, "train.txt", "65 x.JPEG\n970 y.JPEG\n") == {"x.JPEG": "65", "y.JPEG": "970"}
    assert read(tmp_path, "train.txt", "a, b.jpg 3\nc.jpg 4\n") == {"a, b.jpg": "3", "c.jpg": "4"}


def test_the_label_is_the_third_of_three_columns_without_a_header_if_one_says_the_split(tmp_path: Path) -> None:
    rows = "TRAIN,gs://b/a.jpg,daisy\nTEST,gs://b/b.jpg,rose\n"  # as AutoML imports it
    assert read(tmp_path, "a.csv", rows) == {"gs://b/a.jpg": "daisy", "gs://b/b.jpg": "rose"}
    with pytest.raises(UsageError, match="among its columns column 1, key, column 3; name the right one"):
        read(tmp_path, "a.csv", rows.replace("TEST", "TRAIN"))


def test_keys_are_in_the_column_whose_values_end_like_images(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(tmp_path, "a.csv", "key,Filename,label\n1,2.jpg,cat\n2,1.jpg,dog\n") == {"2.jpg": "cat", "1.jpg": "dog"}
    assert "'Filename' is read of the columns 'key', 'Filename'" in caplog.text
    assert read(tmp_path, "a.csv", "key,filename,label\n1,a.jpg,cat\n2,b,dog\n") == {"1": "cat", "2": "dog"}
    assert read(tmp_path, "a.csv", "key,filename,label\n1,a.jpg,cat\n", key="key") == {"1": "cat"}
    numbered = "image,name,label\n1,0.jpg,cat\n0,1.jpg,dog\n"  # 1 may be the row, or 1.jpg
    with pytest.raises(UsageError, match="numbers in the column 'image', and names of images in 'name'; name"):
        read(tmp_path, "a.csv", numbered)
    assert read(tmp_path, "a.csv", numbered, key="name") == {"0.jpg": "cat", "1.jpg": "dog"}
    with_urls = numbered.replace("0.jpg", "https://example.org/7.jpg").replace("1.jpg", "https://example.org/8.jpg")
    assert read(tmp_path, "a.csv", with_urls) == {"1": "cat", "0": "dog"}


def test_columns_between_tabs_may_have_commas_in_their_names(tmp_path: Path) -> None:
    content = "path\tlabel\tsize (w, h, c)\na.jpg\tcat\t3, 4, 3\nb.jpg\tdog\t5, 4, 3\n"
    assert read(tmp_path, "a.tsv", content) == {"a.jpg": "cat", "b.jpg": "dog"}


def test_lists_of_more_columns_between_blanks_and_remarks_before_them(tmp_path: Path) -> None:
    pets = "#Image CLASS-ID SPECIES\n# 1:Cat 2:Dog\nAbyssinian_100 1 1\nbeagle_7 5 2\n"
    assert read(tmp_path, "list.txt", pets, label=("column 2",)) == {"Abyssinian_100": "1", "beagle_7": "5"}
    with pytest.raises(UsageError, match="among its columns key, column 2, column 3; name the right one"):
        read(tmp_path, "list.txt", pets)
    assert read(tmp_path, "a.csv", "# mine\r\n# too\r\npath,label\r\na.jpg,1\r\n") == {"a.jpg": "1"}
    assert read(tmp_path, "a.csv", "\n# mine\n\n# too\n\npath,label\na.jpg,1\n") == {"a.jpg": "1"}
    assert read(tmp_path, "a.csv", "#1.jpg,1\n#2.jpg,0\n") == {"#1.jpg": "1", "#2.jpg": "0"}
    assert read(tmp_path, "a.csv", "#,path,label\n0,a.jpg,1\n") == {"a.jpg": "1"}
    for header in ("# path,label", "#path,label", "# of images\n# path,label", "# label of each image\npath,label"):
        assert read(tmp_path, "a.csv", f"{header}\na.jpg,1\n") == {"a.jpg": "1"}


def test_texts_in_quotes_may_be_divided_by_blanks_as_r_writes_them(tmp_path: Path) -> None:
    content = '"path" "label"\n"a b.jpg" "hot dog"\n"c.jpg" "cat"\n'
    for name in ("a.txt", "a.csv"):
        assert read(tmp_path, name, content) == {"a b.jpg": "hot dog", "c.jpg": "cat"}
    with pytest.raises(UsageError, match="Expected 2 columns, got 3"):  # row.names = TRUE
        read(tmp_path, "a.txt", '"path" "label"\n"1" "a.jpg" "cat"\n')


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d\nsize 12\n", "is a pointer of Git LFS; fetch"),
        ("\n<!DOCTYPE html><html>\n<body>a.jpg cat\n", "is HTML or XML, such as a page of a web server"),
    ],
)
@pytest.mark.parametrize("name", ["labels.csv", "labels.txt", "labels.json"])
def test_what_a_download_has_put_in_place_of_a_label_file_is_called_that(
    content: str, told: str, name: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=told):
        read(tmp_path, name, content)


def test_labels_in_a_list_may_contain_blanks_behind_names_of_images(tmp_path: Path) -> None:
    rows = {"a b.jpg": "great white shark", "c.jpg": "cat", "d/e.JPEG": "hot dog"}
    assert read(tmp_path, "list.txt", lines(rows, " ")) == rows
    several = {"a.jpg": "banded", "b.jpg": "banded dotted"}
    joined = {"a.jpg": "banded", "b.jpg": f"banded{JOINED}dotted"}
    assert read(tmp_path, "list.txt", lines(several, "  "), separator=" ") == joined


@pytest.mark.parametrize("content", ["cat/1\ndog/2\n", "cat/1.jpg\ndog/2 b.jpg\n", "path\ncat/1.jpg\ndog/2.jpg\n"])
def test_a_list_of_images_alone_has_classes_by_its_folders(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert list(read(tmp_path, "train.txt", content).values()) == ["cat", "dog"]
    assert "train.txt has no labels: the folders in it are the classes" in caplog.text


@pytest.mark.parametrize(("name", "between"), [("labels.csv", ","), ("labels.csv", ";"), ("labels.tsv", "\t")])
def test_a_first_line_that_names_an_image_is_no_header(name: str, between: str, tmp_path: Path) -> None:
    assert read(tmp_path, name, lines(LABELS, between)) == LABELS
    with pytest.raises(UsageError, match="among its columns column 1, key, column 3; name the right one with --label"):
        read(tmp_path, name, "0 a.jpg cat\n1 b.jpg dog\n".replace(" ", between))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("cat\ndog\n", r"has one column, such as 'cat', with neither labels nor folders"),
        ("a.jpg 1\nb.jpg\n", r"\(line 2 is 'b.jpg', but should have 2 columns\)"),
        ("", "cannot be read as a table"),
    ],
)
def test_lists_that_are_no_tables_are_refused(content: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        read(tmp_path, "classes.txt", content)


@pytest.mark.parametrize(
    "content",
    [
        'path,label\na.jpg,"cat\nb.jpg,dog\nc.jpg,cat\n',  # all to the end would be one label
        'path,notes,label\na.jpg," wide",cat\nb.jpg," wide,dog\nc.jpg,"5"" wide",cat\n',
        'path,notes,label\na.jpg," wide,cat\nb.jpg,x,dog\nc.jpg," wide,cat\nd.jpg,x,dog\n',  # b.jpg would be lost
        'z.jpg,dog\na.jpg,"cat\nb.jpg,dog\n',
    ],
)
def test_a_quotation_mark_that_is_not_closed_swallows_no_rows(content: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'[ab].jpg,\" ?\w+.*' has a quotation mark that begins a value, and none"):
        read(tmp_path, "labels.csv", content)


def test_texts_in_quotes_may_have_several_lines_and_quotation_marks(tmp_path: Path) -> None:
    notes = ['"two\nlines, and ""quotes"" "', '5" wide', '""', '"a\r\nb" ']
    rows = "".join(f"{name}.jpg,{text},{name}\n" for name, text in zip("abcd", notes, strict=True))
    assert read(tmp_path, "labels.csv", "path,notes,label\n" + rows) == {f"{name}.jpg": name for name in "abcd"}


def test_quotation_marks_behind_blanks_and_texts_of_excel_are_no_parts_of_labels(tmp_path: Path) -> None:
    content = 'path, "label"\na.jpg, "cat"\nb.jpg, cat\nc.jpg,"=""007"""\nd.jpg,5" wide\n'
    labels = {"a.jpg": "cat", "b.jpg": "cat", "c.jpg": "007", "d.jpg": '5" wide'}
    assert read(tmp_path, "labels.csv", content) == labels


def test_what_stands_above_the_names_of_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its first line, 'Animals of 2024', has no names of columns; remove what"):
        read(tmp_path, "labels.csv", "Animals of 2024\npath,label\na.jpg,cat\nb.jpg,dog\n")


RECORDS = [{"path": key, "label": label} for key, label in LABELS.items()]
COLUMNS = {name: [record[name] for record in RECORDS] for name in ("path", "label")}


@pytest.mark.parametrize(
    "document",
    [
        RECORDS,
        LABELS,
        COLUMNS,
        {name: dict(zip("012", values, strict=True)) for name, values in COLUMNS.items()},  # pandas
        {str(number): record for number, record in enumerate(RECORDS)},  # pandas with orient="index"
        {"columns": ["path", "label"], "index": [0, 1, 2], "data": [list(record.values()) for record in RECORDS]},
        {"schema": {"fields": []}, "data": RECORDS},
        {"labels": [[key, label] for key, label in LABELS.items()]},
        {key: {"label": label} for key, label in LABELS.items()},
        {"007": ["a b.jpg", "d/e.png"], "7": ["c.jpg"]},
        {"007": ["a b.jpg", "d/e.png"], "7": ["c.jpg"], "8": []},
        {key: [label] for key, label in LABELS.items()},
        {
            "images": [{"id": number, "file_name": key} for number, key in enumerate(LABELS)],
            "annotations": [
                {"image_id": number, "category_id": int(label == "7")} for number, label in enumerate(LABELS.values())
            ],
            "categories": [{"id": 0, "name": "007"}, {"id": 1, "name": "7"}],
        },
    ],
)
def test_json_in_any_form_in_which_programs_write_tables(document: Any, tmp_path: Path) -> None:
    assert read(tmp_path, "labels.json", json.dumps(document, indent=1)) == LABELS


NAMES = [
    {"classes": ["dog", "cat"]},
    {"class_names": {"0": "dog", "1": "cat"}},
    {"categories": {"dog": 0, "cat": 1}},
    {"categories": [{"id": 1, "name": "cat"}, {"id": 0, "name": "dog", "supercategory": ""}]},
]


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize(
    "table",
    [
        {"labels": {"a.jpg": 1, "b.jpg": 0}},
        {"labels": [["a.jpg", 1], ["b.jpg", 0]]},
        {"data": [{"path": "a.jpg", "target": 1}, {"path": "b.jpg", "target": 0}]},
        {"data": [{"path": "a.jpg", "label": "cat"}, {"path": "b.jpg", "label": "dog"}]},
        {"train": {"a.jpg": 1}, "test": [["b.jpg", 0]]},
    ],
)
def test_names_of_classes_beside_a_table_are_the_labels(names: Any, table: Any, tmp_path: Path) -> None:
    assert read(tmp_path, "labels.json", json.dumps({**names, **table})) == {"a.jpg": "cat", "b.jpg": "dog"}


def test_images_by_class_may_be_paths_without_suffixes(tmp_path: Path) -> None:
    document = {"apple_pie": ["apple_pie/1005649", "apple_pie/1011328"], "baklava": ["baklava/1034061"]}  # Food-101's
    labels = {key: name for name, keys in document.items() for key in keys}
    assert read(tmp_path, "train.json", json.dumps(document)) == labels


def test_images_beside_names_of_classes_may_lack_their_suffixes(tmp_path: Path) -> None:
    document = {"classes": ["dog", "cat"], "labels": {"000001": 1, "000002": 0}}  # as FiftyOne writes it
    assert read(tmp_path, "labels.json", json.dumps(document)) == {"000001": "cat", "000002": "dog"}


def test_names_of_classes_are_those_of_several_labels_and_of_the_column_that_is_named(tmp_path: Path) -> None:
    several = {**NAMES[0], "data": [{"path": "a.jpg", "label": [0, 1]}, {"path": "b.jpg", "label": None}]}
    assert read(tmp_path, "a.json", json.dumps(several), separator=",") == {"a.jpg": f"cat{JOINED}dog", "b.jpg": ""}
    rows = [{"path": "a.jpg", "kind": 1, "label": "x"}, {"path": "b.jpg", "kind": None, "label": "y"}]
    named = json.dumps({**NAMES[0], "data": rows})
    assert read(tmp_path, "a.json", named, label=("kind",)) == {"a.jpg": "cat", "b.jpg": ""}


@pytest.mark.parametrize(
    "document",
    [
        {"classes": 2, "data": [["a.jpg", 1], ["b.jpg", 0]]},
        {"names": "as in the paper", "labels": {"a.jpg": 1, "b.jpg": 0}},
        {"classes": [1, 0], "path": ["a.jpg", "b.jpg"]},
        {"path": {"a.jpg": "a.jpg", "b.jpg": "b.jpg"}, "label": {"a.jpg": 1, "b.jpg": 0}},
    ],
)
def test_what_names_no_classes_changes_no_labels(document: Any, tmp_path: Path) -> None:
    column = ("classes",) if "path" in document and "classes" in document else ()
    assert read(tmp_path, "labels.json", json.dumps(document), label=column) == {"a.jpg": "1", "b.jpg": "0"}


def test_lists_of_labels_in_a_document_stay(tmp_path: Path) -> None:
    rows = json.dumps({"data": [{"path": "a.jpg", "label": ["x", "y"]}, {"path": "b.jpg", "label": ["x"]}]})
    assert read(tmp_path, "labels.json", rows, separator=",") == {"a.jpg": f"x{JOINED}y", "b.jpg": "x"}


def test_json_lines_may_be_called_json_and_a_list_json_lines(tmp_path: Path) -> None:
    rows = "\n".join(map(json.dumps, RECORDS))
    assert read(tmp_path, "labels.json", rows) == read(tmp_path, "labels.jsonl", json.dumps(RECORDS)) == LABELS


@pytest.mark.parametrize(
    "document",
    [{"train": [["a.jpg", 1]], "val": [["b.jpg", 2]]}, {"train": {"a.jpg": 1}, "val": {"b.jpg": 2}}],
)
def test_tables_of_training_and_test_images_in_one_document_are_splits(document: Any, tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text(json.dumps(document))
    table = read_label_file(str(tmp_path / "split.json"), LabelColumns())
    assert (list(table.keys), list(table.labels), list(table.splits)) == (
        ["a.jpg", "b.jpg"],
        ["1", "2"],
        ["train", "val"],
    )


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ('"2024-01-01"', "2024-01-01"),
        ('"2024-01-01T00:00:00Z"', "2024-01-01T00:00:00Z"),
        ("18446744073709551617", "18446744073709551617"),
        ("12345678901234567.25", "12345678901234567.25"),
        ("0.10", "0.10"),
        ("true", "true"),
        ("null", ""),
        ('"12:30"', "12:30"),
        ("[3]", "3"),
        ("[]", ""),
    ],
)
def test_values_in_json_are_the_text_that_stands_there(value: str, label: str, tmp_path: Path) -> None:
    found = read(tmp_path, "m.jsonl", f'{{"file_name": "a.jpg", "label": {value}}}\n{{"file_name": "b.jpg"}}\n')
    assert found == {"a.jpg": label, "b.jpg": ""}


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_lists_of_labels_are_several_classes_if_that_is_asked_for(suffix: str, tmp_path: Path) -> None:
    rows = [{"path": key, "label": labels} for key, labels in LISTS.items()]
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "written.parquet")
        content = (tmp_path / "written.parquet").read_bytes()
    else:
        content = (json.dumps(rows) if suffix == ".json" else "\n".join(map(json.dumps, rows))).encode()
    found = read(tmp_path, f"labels{suffix}", content, separator=" ")
    assert found == {key: JOINED.join(labels) for key, labels in LISTS.items()}
    with pytest.raises(UsageError, match=r"1 of 3 rows of .* have a list of several labels; give --label-separator"):
        read(tmp_path, f"labels{suffix}", content)


def test_numbers_in_parquet_are_the_classes_that_its_metadata_names(tmp_path: Path) -> None:
    table = pa.table({"file_name": ["a.jpg", "b.jpg", "c.jpg", "d.jpg"], "label": [1, 0, -1, None], "age": range(4)})
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}, "age": {"_type": "Value"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "hub.parquet")
    content = (tmp_path / "hub.parquet").read_bytes()
    assert read(tmp_path, "a.parquet", content) == {"a.jpg": "dog", "b.jpg": "cat", "c.jpg": "", "d.jpg": ""}
    table = table.set_column(1, "label", pa.array([1, 0, 2, None]))
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "hub.parquet")
    with pytest.raises(UsageError, match=r"^The label file \S+ has the label 2, and names of 2 classes; correct it.$"):
        read(tmp_path, "a.parquet", (tmp_path / "hub.parquet").read_bytes())


def coco(**changes: Any) -> str:
    document = {
        "images": [{"id": 7, "file_name": "a.jpg", "site": "x"}, {"id": 8, "file_name": "b.jpg", "site": "y"}],
        "annotations": [{"image_id": 7, "category_id": 2}, {"image_id": 7, "category_id": 2}],
        "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}],
        **changes,
    }
    return json.dumps(document)


def test_images_of_coco_have_the_categories_of_their_annotations(tmp_path: Path) -> None:
    assert read(tmp_path, "coco.json", coco()) == {"a.jpg": "dog", "b.jpg": ""}
    several = coco(annotations=[{"image_id": 7, "category_id": number} for number in (2, 1)])
    assert read(tmp_path, "coco.json", several, separator=",") == {"a.jpg": f"cat{JOINED}dog", "b.jpg": ""}
    with pytest.raises(UsageError, match=r"1 of 2 rows of .* have a list of several labels"):
        read(tmp_path, "coco.json", several)


def test_ids_are_the_labels_of_coco_if_no_category_has_a_name(tmp_path: Path) -> None:
    assert read(tmp_path, "coco.json", coco(categories=[{"id": 1}, {"id": 2}])) == {"a.jpg": "2", "b.jpg": ""}


def datumaro(*numbers: int) -> str:
    labels = [{"name": "cat", "parent": "", "attributes": []}, {"name": "dog", "parent": "", "attributes": []}]
    annotations = [{"id": 0, "type": "label", "group": 0, "label_id": number} for number in numbers]
    items = [
        {"id": "x/a.1", "annotations": annotations, "attr": {}, "image": {"path": "a.1.jpg"}},
        {"id": "b", "annotations": [{"id": 0, "type": "caption", "caption": "two"}], "attr": {}},
    ]
    return json.dumps({"info": {}, "categories": {"label": {"labels": labels, "attributes": []}}, "items": items})


def test_items_of_datumaro_have_the_names_of_their_labels(tmp_path: Path) -> None:
    assert read(tmp_path, "default.json", datumaro(1, 1)) == {"x/a.1": "dog", "b": ""}
    assert read(tmp_path, "default.json", datumaro(1, 0), separator=",") == {"x/a.1": f"cat{JOINED}dog", "b": ""}


CAT_AND_DOG = {"a.jpg": "cat", "b.jpg": "dog"}


@pytest.mark.parametrize(
    ("record", "key", "label"),
    [
        (lambda key, label: {"uri": key, "annotation": {"displayName": label}}, "uri", "annotation.displayName"),
        (lambda key, label: {"filename": key, "attributes": {"kind": {"name": label}}}, None, "attributes.kind.name"),
        (lambda key, label: {"file": key, "annotations": [{"name": label}]}, None, "annotations.name"),
        (
            lambda key, label: {"data": {"image": key}, "annotations": [{"result": [{"value": {"choices": [label]}}]}]},
            "data.image",
            "annotations.result.value.choices",
        ),
    ],
)
def test_what_is_inside_of_records_is_named_by_its_path(record: Any, key: Any, label: str, tmp_path: Path) -> None:
    records = [record(name, kind) for name, kind in CAT_AND_DOG.items()]
    for name, content in {"a.json": json.dumps(records), "a.jsonl": "\n".join(map(json.dumps, records))}.items():
        assert read(tmp_path, name, content, key=key, label=(label,)) == CAT_AND_DOG
    if label != "annotations.name" and "result" not in label:
        pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
        content = (tmp_path / "a.parquet").read_bytes()
        assert read(tmp_path, "a.parquet", content, key=key, label=(label,)) == CAT_AND_DOG


def test_a_label_may_be_a_text_in_some_records_and_an_object_in_others(tmp_path: Path) -> None:
    labels: list[Any] = ["cat", {"choices": ["cat", "dog"]}, {"name": "owl", "score": 0.5}]  # two are Label Studio's
    records = json.dumps([{"image": f"{number}.jpg", "choice": label} for number, label in enumerate(labels)])
    several = read(tmp_path, "a.json", records, label=("choice",), separator=",")
    assert several["0.jpg"] == "cat" and several["1.jpg"] == f"cat{JOINED}dog" and "owl" in several["2.jpg"]
    with pytest.raises(UsageError, match=r"1 of 3 rows of .* have a list of several labels"):
        read(tmp_path, "a.json", records, label=("choice",))


def test_a_project_of_vgg_image_annotator_is_read_as_its_export_is(tmp_path: Path) -> None:
    images = {f"{key}99": {"filename": key, "file_attributes": {"kind": name}} for key, name in CAT_AND_DOG.items()}
    project = {"_via_settings": {"ui": {"height": 25}}, "_via_img_metadata": images, "_via_image_id_list": list(images)}
    for document in (images, project):
        assert read(tmp_path, "a.json", json.dumps(document), label=("file_attributes.kind",)) == CAT_AND_DOG


def test_several_attributes_in_a_cell_are_columns_called_by_their_paths(tmp_path: Path) -> None:
    cells = {key: {"kind": name, "sharp": {"yes": 1}} for key, name in CAT_AND_DOG.items()}
    texts = [(key, json.dumps(cell).replace('"', '""')) for key, cell in {**cells, "no.jpg": {}}.items()]
    rows = "".join(f'{key},9,"{text}"\n' for key, text in texts)
    content = f"filename,file_size,file_attributes\n{rows}"
    expected = {**CAT_AND_DOG, "no.jpg": ""}
    assert read(tmp_path, "via.csv", content, label=("file_attributes.kind",)) == expected
    with pytest.raises(UsageError, match=r"columns file_attributes\.kind, file_attributes\.sharp\.yes, filename"):
        read(tmp_path, "via.csv", content, label=("file_attributes",))


def test_lists_of_other_programs_have_suffixes_of_their_own(tmp_path: Path) -> None:
    records = "".join(f'{{"source-ref": "{key}", "kind": "{name}"}}\n' for key, name in CAT_AND_DOG.items())
    assert read(tmp_path, "output.manifest", records, key="source-ref", label=("kind",)) == CAT_AND_DOG
    rows = "".join(f"{number}\t{name}\t{key}\n" for number, (key, name) in enumerate(CAT_AND_DOG.items()))
    assert read(tmp_path, "train.lst", rows, label=("column 2",)) == CAT_AND_DOG


def test_records_of_names_of_their_own_are_refused_before_they_fill_the_memory(tmp_path: Path) -> None:
    records = [{"path": f"{number}.jpg", "label": "cat", "marks": {f"id{number}": 1}} for number in range(12_000)]
    with pytest.raises(UsageError, match=r"its 12,000 records have 12,002 different names in them, such as 'marks\.id"):
        read(tmp_path, "a.json", json.dumps(records))


def test_a_record_that_is_named_as_a_column_is_refused_with_what_is_in_it(tmp_path: Path) -> None:
    record = {"path": "a.jpg", **{f"column {number}": 1 for number in range(10)}, "truth": {"label": "cat"}}
    with pytest.raises(UsageError, match=r"no column 'truth' among its columns truth\.label, path, column 0"):
        read(tmp_path, "a.json", json.dumps([record]), label=("truth",))


def test_records_of_one_image_are_its_classes_if_it_may_have_several(tmp_path: Path) -> None:
    records = [{"path": "a.jpg", "tags": [{"name": "cat"}, {"name": "dog"}]}, {"path": "b.jpg", "tags": []}]
    expected = {"a.jpg": f"cat{JOINED}dog", "b.jpg": ""}
    assert read(tmp_path, "a.json", json.dumps(records), label=("tags.name",), separator=",") == expected


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (datumaro(2), "the item x/a.1 has the label 2, of 2 labels"),
        (coco(images=[{"id": 7, "file_name": "a"}] * 2), "several of its images have one id"),
        (coco(annotations=[{"image_id": 1, "category_id": 2}]), "the image 1 and the category 2 has an id not in"),
        (coco(categories=[{"id": 1, "name": "cat"}]), "cannot be read as a table"),
        (coco(categories=[{"id": 1, "name": "cat"}, {"id": 2}]), "1 of its 2 categories have no name, .* the id 2"),
        (coco(categories=["cat", "dog"]), "its objects and lists are nested in a form that is not known"),
        (coco(annotations=[None]), "its objects and lists are nested in a form that is not known"),
        ('{"a.jpg": "cat", "a.jpg": "dog"}', "the name 'a.jpg' is there twice"),
        ('{"path": ["a", "b"], "label": ["x"]}', "its columns have 1 to 2 values"),
        ('{"a": [{"path": 1}], "b": [{"path": 2}]}', "it holds several tables, a, b"),
        ('[{"path": "a", "label": {"id": 1}}]', "category among its columns path, label.id"),
        ('[{"path": "a", "label": [[1]]}]', "holds lists"),
        ('[{"path": ["a"], "label": 1}]', "holds lists"),
        ('{"classes": ["cat"], "labels": {"a.jpg": 0, "b.jpg": 1}}', "the label '1' is none of its 1 class"),
        ('{"classes": ["0", "2", "1"], "labels": {"a.jpg": 0, "b.jpg": 1}}', "numbers of its classes as well as names"),
        ('{"classes": ["cat", "cat"], "labels": {"a.jpg": 0}}', "classes has to give each class a number and a name"),
        ('{"names": {"x": "cat"}, "labels": {"a.jpg": 0}}', "names has to give each class a number and a name"),
        ('{"classes": [{"x": 1}], "labels": {"a.jpg": 0}}', "there is no 'id'"),
        ('"text"', "it has no records"),
        ("{}", "it has no records"),
        ("[1, 2]", "it is no list of records"),
        ("[" * 100_000, "cannot be read as a table"),
        ('{"path": "a"', "cannot be read as a table"),
        ('[["a.jpg", 1], ["b.jpg"]]', "row 2 has 1 value, and there are 2 columns"),
        ('{"columns": ["a", "b"], "data": [["a.jpg", 1], ["b.jpg"]]}', "row 2 has 1 value, and there are 2 columns"),
    ],
)
def test_json_that_says_no_labels_is_refused(content: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told) as raised:
        read(tmp_path, "labels.json", content)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("labels", [[[0, 1, 1], [1, 0, 0]], ["0 1 1", "1 0 0"], ["[0 1]", "[1 1]"]])
def test_numbers_that_do_not_say_their_classes_are_refused(labels: Any, tmp_path: Path) -> None:
    rows = json.dumps([{"path": f"{place}.jpg", "label": label} for place, label in enumerate(labels)])
    with pytest.raises(UsageError, match="numbers 0 or 1, which do not say the classes that they stand for"):
        read(tmp_path, "labels.json", rows, separator=" ")
    if isinstance(labels[0], list):
        named = json.dumps({"classes": ["cat", "dog", "cow"], "data": json.loads(rows)})
        with pytest.raises(UsageError, match="numbers 0 or 1, which do not say"):
            read(tmp_path, "labels.json", named, separator=" ")


def repeated(text: str, number: int) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array([0] * number, pa.int32()), [text])


@pytest.mark.parametrize(
    "label",
    [
        repeated("x" * 10**5, 10**4),
        pa.ListArray.from_arrays(pa.array(range(10**4 + 1), pa.int32()), repeated("x" * 10**5, 10**4)),
        pa.StructArray.from_arrays([repeated("x" * 10**5, 10**4)], ["name"]),
        pa.FixedSizeListArray.from_arrays(pa.array([7] * 10**7), 1000),
        pa.DictionaryArray.from_arrays(pa.array([0] * 10**4, pa.int32()), pa.array([b"x" * 10**5], pa.binary(10**5))),
    ],
)
def test_parquet_of_some_kilobytes_that_would_take_a_gigabyte_is_refused(label: Any, tmp_path: Path) -> None:
    sink = pa.BufferOutputStream()
    table = pa.table({"key": [f"{number}" for number in range(len(label))], "label": label})
    pq.write_table(table, sink, compression="zstd", store_schema=False)
    content = sink.getvalue().to_pybytes()
    assert len(content) < 200_000
    before = pa.total_allocated_bytes()
    with pytest.raises(
        UsageError, match=r"labels.parquet cannot be read as a table \(its .* bytes would take over .* MB"
    ):
        read(tmp_path, "labels.parquet", content)
    assert pa.total_allocated_bytes() - before < 10_000_000
