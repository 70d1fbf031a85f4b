"""Records to pieces: order, what is trained on, and every record that is refused."""

from __future__ import annotations

import pytest

from megaresume.encoding.images.pieces import Image, Missing
from megaresume.encoding.images.templates import template_from_options
from megaresume.stream.errors import CorpusError
from megaresume.stream.schema import plain_kind
from tests.encoding.images.kit import record

#: no template looks into an image.
X = b"..."


def shown(options, **members):
    """Pieces as text: trained text in [brackets], images as <member>, other text as it is."""
    template = template_from_options(options)
    assert template_from_options(plain_kind(template)) == template
    pieces = template.pieces(record(**members))
    return [
        f"<no {piece.name}>"
        if isinstance(piece, Missing)
        else f"<{piece.member}>"
        if isinstance(piece, Image)
        else f"[{piece.text}]"
        if piece.trained
        else piece.text
        for piece in pieces
    ]


CHAT = {"kind": "chat", "style": "plain"}
LLAVA = {
    "conversations": [
        {"from": "human", "value": "<image>\nWhat is it?"},
        {"from": "gpt", "value": "A cat."},
        {"from": "human", "value": "Sure? <image>"},
        {"from": "gpt", "value": "Yes."},
    ]
}


def test_caption():
    assert shown("caption", jpg=X, txt=" a cat\n") == ["<jpg>", "[a cat]"]
    assert shown({"kind": "caption", "prompt": "\n"}, webp=X, txt="a") == ["<webp>", "\n", "[a]"]
    assert shown({"image_first": False, "strip": False}, png=X, txt="a ") == ["[a ]", "<png>"]
    assert shown({"text_only": True}, txt="a") == ["[a]"]
    assert shown({"json_key": "caption"}, jpg=X, json={"caption": "a"}) == ["<jpg>", "[a]"]
    assert shown({"image": ["seg.png"], "text": "alt", "unused_images": True}, jpg=X, _seg_png=X, alt="a") == [
        "<seg.png>",
        "[a]",
    ]


def test_chat_of_llava():
    assert shown(CHAT, _2_jpg=X, _10_jpg=X, json=LLAVA) == [
        *["user: ", "<2.jpg>", "\nWhat is it?", "\n", "assistant: ", "[A cat.]", "[\n]"],
        *["user: ", "Sure? ", "<10.jpg>", "\n", "assistant: ", "[Yes.]", "[\n]"],
    ]


def test_chat_of_openai_with_names_and_a_system_text():
    parts = [{"type": "text", "text": "A<image>"}, {"type": "image", "image": "b.png"}, {"type": "image"}]
    link = {"type": "image_url", "image_url": {"url": "000123.c.png"}}
    messages = [{"role": "user", "content": [*parts, link]}, {"role": "assistant", "content": "B"}]
    options = {"kind": "chat", "system": "S"}
    assert shown(options, _a_png=X, _b_png=X, _c_png=X, json={"messages": messages}) == [
        *["<|im_start|>system\n", "S", "<|im_end|>", "\n"],
        *["<|im_start|>user\n", "A<image>", "<b.png>", "<a.png>", "<c.png>", "<|im_end|>", "\n"],
        *["<|im_start|>assistant\n", "[B]", "[<|im_end|>]", "\n"],
    ]


def test_chat_takes_images_in_the_order_of_the_json():
    data = {**LLAVA, "images": ["000123.10.jpg", "2.jpg"]}
    pieces = shown(CHAT, _2_jpg=X, _10_jpg=X, json=data)
    assert [piece for piece in pieces if piece.startswith("<")] == ["<10.jpg>", "<2.jpg>"]


def test_chat_of_text_alone_and_own_roles():
    style = {"user": {"before": "Q", "end": "?"}, "assistant": {"before": "A", "end": ".", "after": "|"}}
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert shown({"kind": "chat", "style": style}, json={"messages": turns}) == ["Q", "x", "?", "A", "[y]", "[.]", "|"]


def test_interleaved():
    lists = {"texts": ["a", "b", None, "c", None], "images": [None, None, "0.png", None, "1.png"]}
    assert shown("interleaved", _0_png=X, _1_png=X, json=lists) == ["[a]", "[\nb]", "<0.png>", "[c]", "<1.png>"]
    matched = {"image_name": "0.png", "matched_text_index": 1}
    assert shown("interleaved", _0_png=X, json={"text_list": ["a", "b"], "image_info": [matched]}) == [
        *["[a]", "<0.png>", "[b]"],
    ]
    assert shown("interleaved", json={"texts": ["a"]}) == ["[a]"]


def turns(*contents, role="assistant"):
    return {"messages": [{"role": role, "content": content} for content in contents]}


@pytest.mark.parametrize(
    ("options", "members", "words"),
    [
        ("caption", {"jpg": X}, ["no member txt or caption", "members jpg"]),
        ("caption", {"txt": "a"}, ["no member jpg or jpeg", "members txt"]),
        ("caption", {"jpg": X, "txt": " \n"}, ["has no text"]),
        ("caption", {"jpg": X, "txt": b"a\xff"}, ["txt is not UTF-8", "byte 0xff at 1"]),
        ({"json_key": "c"}, {"jpg": X, "json": {"d": 1}}, ["no 'c' in the JSON", "keys d"]),
        ({"json_key": "c"}, {"jpg": X, "json": {"c": 1}}, ["'c' is not a text", "int"]),
        ({"json_key": "c"}, {"jpg": X, "json": '{"c": "\\ud800"}'}, ["not UTF-8", "surrogate"]),
        (CHAT, {"jpg": X}, ["no member json"]),
        (CHAT, {"json": '{"messages": '}, ["json is not JSON"]),
        (CHAT, {"json": b"\xff"}, ["json is not JSON"]),
        (CHAT, {"json": []}, ["json is not a JSON object", "list"]),
        (CHAT, {"json": "[" * 100_000}, ["json is not JSON"]),
        (CHAT, {"json": {"text": "a"}}, ["no conversation", "conversations or messages"]),
        (CHAT, {"json": {"messages": ["a"]}}, ["messages[0] is not a turn"]),
        (CHAT, {"json": turns("a", role="gtp")}, ["unknown role", "'gtp'"]),
        (CHAT, {"json": turns("a", role="user")}, ["has no text", "assistant"]),
        (CHAT, {"json": turns(None)}, ["messages[0] has no content"]),
        (CHAT, {"json": turns(3)}, ["a turn without text"]),
        (CHAT, {"json": turns([{"type": "table"}])}, ["unknown part of a turn", "'table'"]),
        (CHAT, {"json": turns([{"type": "video"}])}, ["video or audio, which is not supported", "type 'video'"]),
        (CHAT, {"json": {**turns("<video> a"), "video": "a.mp4"}}, ["not supported", "video in the JSON"]),
        (CHAT, {"json": turns("a"), "wav": X}, ["not supported", "wav", "unused_images"]),
        (CHAT, {"json": turns([{"type": "image", "image": "0.MP4"}])}, ["not supported", "0.MP4"]),
        ("caption", {"mp4": X, "txt": "a"}, ["not supported", "mp4"]),
        ("caption", {"jpg": X, "mp4": X, "txt": "a"}, ["not supported", "mp4"]),
        ("caption", {"jpg": X, "png": X, "txt": "a"}, ["images that its document does not show", "png; 1 are shown"]),
        ({"text_only": True}, {"_0_jpg": X, "txt": "a"}, ["does not show", "0.jpg; 0 are shown"]),
        (
            {**CHAT, "unused_images": False},
            {"_0_jpg": X, "_1_jpg": X, "json": {**turns("<image>a"), "images": ["0.jpg"]}},
            ["does not show", "1.jpg; 1 are shown"],
        ),
        ("interleaved", {"_0_mp4": X, "json": {"texts": ["a", None], "images": [None, "0.mp4"]}}, ["not supported"]),
        (
            CHAT,
            {"json": turns([{"type": "image", "image": "z.png"}]), "jpg": X},
            ["no image 'z.png'", "members jpg, json"],
        ),
        (CHAT, {"json": turns("<image> a")}, ["images and their marks do not agree", "images none"]),
        (CHAT, {"json": turns("a"), "jpg": X}, ["images and their marks do not agree", "images jpg; 0 marks"]),
        ({"kind": "chat", "style": {"user": {}}}, {"json": turns("a")}, ["a turn of the role 'assistant'"]),
        ("interleaved", {"json": {"texts": ["a"], "images": []}}, ["not two lists of one length", "1 and 0"]),
        ("interleaved", {"json": {"texts": [None], "images": ["q.png"]}}, ["no image 'q.png'"]),
        ("interleaved", {"json": {"texts": [None, " "]}}, ["has no text"]),
        ("interleaved", {"json": {"texts": [7]}}, ["a text is not a text", "int"]),
        ("interleaved", {"_0_png": X, "json": {"texts": ["a"], "pictures": ["0.png"]}}, ["not two lists", "no list"]),
        (
            "interleaved",
            {"_0_png": X, "_1_png": X, "json": {"texts": ["a", None], "images": [None, "1.png"]}},
            ["images that its document does not show", "0.png; 1 are shown", "unused_images: true"],
        ),
        ("interleaved", {"_0_png": X, "json": {"text_list": ["a"]}}, ["does not show", "0.png; 0 are shown"]),
        ("interleaved", {"json": {"text_list": ["a"], "image_info": [{}]}}, ["without the index of its text"]),
    ],
)
def test_refused(options, members, words):
    with pytest.raises(CorpusError) as caught:
        shown(options, **members)
    assert "dir/000123" in caught.value.headline
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_unused_image_can_be_declared():
    assert shown({**CHAT, "unused_images": True}, jpg=X, json=turns("a")) == ["assistant: ", "[a]", "[\n]"]
    assert shown({"unused_images": True}, jpg=X, png=X, mp4=X, txt="a") == ["<jpg>", "[a]"]


def test_an_image_that_is_not_there_can_be_left_out_of_its_page():
    page = {"texts": ["a", None, "b", None, "c"], "images": [None, "0.png", None, "1.png", None]}
    options = {"kind": "interleaved", "missing_images": True}
    assert shown(options, _1_png=X, json=page) == ["[a]", "<no 0.png>", "[\nb]", "<1.png>", "[c]"]
    assert shown(options, _0_png=b"", _1_png=X, json=page) == ["[a]", "<no 0.png>", "[\nb]", "<1.png>", "[c]"]
    assert shown(options, json=page) == ["[a]", "<no 0.png>", "[\nb]", "<no 1.png>", "[\nc]"]


@pytest.mark.parametrize("extension", ["tif", "tiff", "avif", "heic", "heif"])
def test_an_image_is_one_by_its_extension_also_if_it_cannot_be_decoded(extension):
    """With text_only it was left out, and the caption trained alone."""
    assert shown({"text_only": True}, **{extension: X}, txt="a") == [f"<{extension}>", "[a]"]
