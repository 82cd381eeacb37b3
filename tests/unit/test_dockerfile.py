"""What a Dockerfile starts from is found as builders find it."""

import pytest

from manycpu.pipeline.spec.image import base_images, copied_images


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("FROM python:3.12", ["python:3.12"]),
        ("from --platform=linux/amd64 debian as a\nFROM a\n", ["debian"]),
        ("FROM scratch\nFROM a.b/c@sha256:12 AS x\nCOPY --from=x / /", ["a.b/c@sha256:12"]),
        ("ARG V=12\nARG BASE=debian:$V\nFROM ${BASE} AS a\nARG BASE=other\nFROM ${BASE}", ["debian:12"]),
        ("FROM debian:${V:-13}\n# FROM none\nRUN echo \\\n  FROM x", ["debian:13"]),
        ('ARG BASE="quoted:1"\nFROM $BASE', ["quoted:1"]),
        ("ARG BASE=python V='3.12' TAG=$V-slim OTHER\nFROM ${BASE}:${TAG}", ["python:3.12-slim"]),
        ("FROM a\nRUN cat <<A >/x && \\\n  cat <<-'B.1' >/y\nFROM b\nA\nFROM c\n\tB.1\nFROM d\n", ["a", "d"]),
        ("FROM a\nRUN <<EOF\nFROM b\nEOF\nFROM c", ["a", "c"]),
        ("FROM a\nRUN cat 0<<EOF\nFROM b\nEOF\nONBUILD RUN <<EOF\nFROM c\nEOF\nFROM d", ["a", "d"]),
        ("FROM a\nRUN echo \\ \n  && cat <<EOF\nFROM b\nEOF\n", ["a"]),
        ("FROM a AS Build\nFROM build AS x\nFROM X", ["a"]),
        ("FROM a AS base-amd64\nFROM base-${TARGETARCH}", ["a"]),
        ("ARG TARGETARCH\nARG V=12\nARG V\nFROM debian:${V}-${TARGETARCH}", ["debian:12-amd64"]),
        ("ARG V=12\nARG V=\nFROM debian:${V:-13}", ["debian:13"]),
        ('ARG V=12\nFROM "debian:${V}"', ["debian:12"]),
        ("FROM a\nRUN cat <<<EOF && echo $((1<<2)) <<none\nFROM b", ["a", "b"]),
    ],
)
def test_the_images_that_stages_start_from(text: str, found: list[str]) -> None:
    assert base_images(text, {}) == found


def test_images_that_files_are_copied_from() -> None:
    text = """
    FROM a.test/base AS build
    COPY --link --from=b.test/uv:1 /uv /bin/
    COPY --from=build / /
    RUN --mount=type=bind,from=c.test/data,target=/d --mount=from=d.test/more,target=/m true
    COPY --from="e.test/quoted" / /
    """
    assert copied_images(text) == ["b.test/uv:1", "c.test/data", "d.test/more", "e.test/quoted"]


def test_arguments_win_over_defaults() -> None:
    assert base_images("ARG BASE=debian\nARG V\nFROM $BASE:$V", {"BASE": "ubuntu", "V": "24.04"}) == [
        "ubuntu:24.04"
    ]
