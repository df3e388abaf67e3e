import re
from html.parser import HTMLParser

import pytest

from pma_jax.reporting import html
from pma_jax.reporting.interactive import bokeh_script
from pma_jax.reporting.report import build_report

SCRIPTS = ("plots", "dark-colors", "BokehJS", "page.js")
VOID = {"meta", "img", "source", "br", "link", "input"}


class Page(HTMLParser):
    """Check that tags are balanced; keep attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def report(realistic):
    run, fork = realistic
    return build_report(run, [fork])


def test_page_parses_and_is_self_contained(report):
    text = html.render_page(report, "{}")
    page = Page(text)
    assert page.tags.count("script") == len(SCRIPTS)
    assert not {"link", "iframe", "object", "img"} & set(page.tags)
    for name, _ in page.attributes:
        assert name not in ("src", "href", "srcset") and not name.startswith("on")
    own = text.replace(bokeh_script(), "")
    assert len(text) - len(own) > 1_000_000
    assert "http://" not in own and "https://" not in own
    assert "url(" not in own and "@import" not in own
    # Whatever Bokeh's script would do, the browser fetches nothing.
    assert "default-src 'none'" in own and "connect-src" not in own


def test_page_contains_the_report(report):
    page = Page(html.render_page(report, '{"config": "here"}'))
    text = " ".join(page.text)
    assert report["finding"] in text
    assert '{"config": "here"}' in text
    for fact in (report["corpus_digest"], report["evaluation_digest"], report["config_digest"], *report["commands"]):
        assert fact in text
    for merge in report["merges"]:
        assert f"{merge['loss']:.4f}" in text and f"{merge['recovered_share']:.1%}" in text
    assert f"{report['previews_below_raw']} of {report['previews_total']} previews" in text


def test_only_the_best_merge_is_bold(report):
    strong = re.findall(r"<strong>(.*?)</strong>", html.render_page(report, "{}"))
    assert strong == [f"{report['best_merge']['loss']:.4f}"]


def test_text_from_files_is_escaped(report):
    evil = "<script>alert(1)</script>"
    report["notes"], report["run"], report["versions"] = [evil], evil, {evil: evil}
    report["curves"]["previews"][evil] = report["curves"]["previews"].pop("sma:3")
    page = Page(html.render_page(report, evil))
    assert page.tags.count("script") == len(SCRIPTS) and evil in " ".join(page.text)


def test_run_without_forks_has_a_page(realistic):
    run, _ = realistic
    page = Page(html.render_page(build_report(run, []), "{}"))
    assert "Recovered is" not in " ".join(page.text)
