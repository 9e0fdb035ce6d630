"""Hook of MkDocs: adds the generated pages, and adapts links.

`site_settings` and `site_api` generate the reference, and `site_links` the pages of files that pages link to. In the
text of a page, a setting in backticks (`model.objective.beta`) becomes a link to its entry.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import site_api
import site_links
import site_settings
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

UNLINKED = re.compile(r"(<pre.*?</pre>|<a\b.*?</a>|<h[1-6].*?</h[1-6]>)", re.DOTALL)
"""Code blocks, links and headings, in which settings are not linked."""

CODE = re.compile(r"<code>([A-Za-z_][\w.]*)((?:: |=)[^<]*)?</code>")
FILE = re.compile(r"<code>((?:recipes|notebooks)/[\w./-]+\.\w+)</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and a page for each file that a page links to."""
    try:
        generated = site_settings.pages() | site_api.pages()
    except ValueError as error:
        raise PluginError(f"The reference is incomplete:\n{error}") from error
    for path, text in generated.items():
        files.append(File.generated(config, path, content=front_matter(path) + text))
    pages = {site_links.repository_path(file.src_uri): file.content_string for file in files.documentation_pages()}
    for path, source in site_links.linked_files(pages).items():
        if path.endswith(".md"):
            files.append(File.generated(config, path, content=front_matter(path) + site_links.content(source)))
        else:
            files.append(File.generated(config, path, abs_src_path=str(source)))
    return files


def front_matter(path: str) -> str:
    """Settings come first in the results of a search, and pages of files are left out."""
    if path.startswith(f"{site_links.SHOWN}/"):
        return "---\nsearch: {exclude: true}\n---\n\n"
    return "---\nsearch: {boost: 2}\n---\n\n" if path.startswith(site_settings.FOLDER) else ""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links of the site."""
    source = site_links.repository_path(page.file.src_uri)
    return site_links.rewrite(markdown, lambda target: site_links.site_link(source, target))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link settings in the text to their entries in the reference, and recipes and notebooks to their pages."""
    entries = {name: (path, anchor) for name, path, anchor in site_settings.links()}

    def entry_link(code: re.Match[str]) -> str:
        # A plain word, such as `rewards`, may be a setting of several objects, or none.
        is_word = code[1].islower() and not re.search(r"[._]", code[1])
        path, anchor = ("", "") if is_word else entries.get(code[1]) or entries.get(f"model.{code[1]}") or ("", "")
        if not path or (path == page.file.src_uri):
            return code[0]
        file = files.get_file_from_path(path)
        assert file is not None, path
        url = get_relative_url(file.url, page.url)
        return f'<a class="setting" href="{url}{"#" if anchor else ""}{anchor}">{code[0]}</a>'

    def file_link(code: re.Match[str]) -> str:
        file = files.get_file_from_path(site_links.site_path(code[1]))
        return code[0] if file is None else f'<a href="{get_relative_url(file.url, page.url)}">{code[0]}</a>'

    pieces = UNLINKED.split(html)
    return "".join(
        piece if i % 2 else FILE.sub(file_link, CODE.sub(entry_link, piece)) for i, piece in enumerate(pieces)
    )
