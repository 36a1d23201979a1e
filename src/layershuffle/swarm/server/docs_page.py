"""The page /docs: the gateway's API in plain HTML, from its OpenAPI description.

Swagger's page would load scripts from another origin, and a swarm may have no internet access.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any

Schema = Mapping[str, Any]

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
"""The browser may load nothing but the page itself."""
_STYLE = """
:root { color-scheme: light dark; }
body { max-width: 56rem; margin: 0 auto; padding: 1.5rem 1rem 4rem;
  font: 1rem/1.5 system-ui, sans-serif; }
h2 { margin-top: 2.5rem; }
.box { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .3rem .7rem .3rem 0; text-align: left; vertical-align: top; }
tbody tr { border-top: 1px solid #8886; }
pre { overflow-x: auto; padding: .7rem; border: 1px solid #8886; }
"""
_EXAMPLE = "curl {key}-F image=@photo.jpg -F top_k=3 http://THIS_GATEWAY{path}"


def docs_page(api: Schema) -> str:
    """The page for an OpenAPI description; all of its text is escaped."""
    info = api["info"]
    parts = [f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>"]
    parts += [f"<p>{escape(info['description'])}</p>"]
    parts += ['<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>']
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            parts += _operation(api, f"{method.upper()} {path}", operation, path=path)
    # The types of an answer's fields, and the form of a refusal.
    for name, schema in api["components"]["schemas"].items():
        parts += _fields(api, name, schema)
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _operation(api: Schema, name: str, operation: Schema, *, path: str) -> Iterator[str]:
    yield f"<h2><code>{escape(name)}</code></h2>\n<p>{escape(operation['summary'])}</p>"
    if "security" in operation:
        yield "<p>Needs an API key: <code>Authorization: Bearer KEY</code> or "
        yield "<code>X-API-Key: KEY</code>.</p>"
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        key = '-H "X-API-Key: KEY" ' if "security" in operation else ""
        yield f"<pre>{escape(_EXAMPLE.format(key=key, path=path))}</pre>"
        yield from _fields(api, f"Fields of the form ({kind})", content["schema"])
    for status, response in operation["responses"].items():
        for content in response.get("content", {}).values():
            # Refusals all have one form; only answers differ.
            if status == "200":
                yield from _fields(api, "Fields of the answer", content["schema"])
    yield "<h3>Statuses</h3>"
    rows = [
        (status, response["description"]) for status, response in operation["responses"].items()
    ]
    yield from _table(("Status", "When"), rows)


def _fields(api: Schema, title: str, schema: Schema) -> Iterator[str]:
    fields = _resolved(api, schema).get("properties", {})
    # Counters for Prometheus are text and have no fields.
    if fields:
        needed = _resolved(api, schema).get("required", ())
        rows = [
            (name, _kind(field), "yes" if name in needed else "no", field.get("description", ""))
            for name, field in fields.items()
        ]
        yield f"<h3>{escape(title)}</h3>"
        yield from _table(("Field", "Kind", "Always", "Meaning"), rows)


def _resolved(api: Schema, schema: Schema) -> Schema:
    """The component that `schema` refers to, else `schema` itself."""
    reference = schema.get("$ref", "")
    return api["components"]["schemas"][reference.rpartition("/")[2]] if reference else schema


def _kind(field: Schema) -> str:
    """The type of a field in words, as "list of string" or "number or null"."""
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if field.get("format") == "binary":
        return "file"
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield '<div class="box"><table><thead><tr>'
    yield "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    yield "</tr></thead><tbody>"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>"
    yield "</tbody></table></div>"
