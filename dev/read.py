#!/usr/bin/env python3
"""Writes build/read.html, one page that shows the course beside the code: `make read`. Standard library only.

The text is that of dev/WALK.md and dev/WALK2.md. A lesson names its functions, types and tests in a comment below
its title, one file a line:

    cpu: reference.cpp: encode, decode
    test: test/reference/1_2_codes.cpp: "decode: every code"

The kind that is named first is open at first. Their code is cut out of the sources here, from the comment above a
definition to its closing brace. A name that is missing, or that two definitions have, is an error; name#2 is the
second of several, and the name of a test may be cut short. The page's style and script are dev/read.css and
dev/read.js.
"""
import base64
import collections
import html
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COURSE = {"WALK.md": "top", "WALK2.md": "lesson-10"}  # its two files, and where each begins on the page
KINDS = {"cpu": "CPU reference", "gpu": "GPU", "test": "Test"}
Definition = collections.namedtuple("Definition", "name first last test is_type")  # lines from 0
SEPARATOR = re.compile(r"\s*// *[-=]{9}")
HEADING = re.compile(r"\s*// --- ")  # above several definitions

# --- Finding definitions: scopes are namespaces and classes, everything else in braces is one definition

def blanked(source):
    """The source with blanks for comments, strings and preprocessor lines, whose braces do not count."""
    token = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
                       r'|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.S | re.M)

    def blank(match):
        word = match.group()
        if word[0] == '"':
            return '"' + " " * (len(word) - 2) + '"'
        blanks = re.sub(r"[^\n]", " ", word)
        return blanks[:-1] + ";" if word.lstrip()[0] == "#" else blanks  # a directive ends what was before
    return token.sub(blank, source)

def closing(text, at):
    """The place of the bracket that closes the one at `at`."""
    last, depth = {"{": "}", "(": ")", "<": ">"}[text[at]], 0
    for i in range(at, len(text)):
        depth += (text[i] == text[at]) - (text[i] == last)
        if depth == 0:
            return i
    sys.exit("read.py: brackets do not match")

def what_begins(header, original):
    """What the text before a brace defines: (name, kind), kind being scope, type, test or code."""
    while found := re.match(r"\s*template\s*(?=<)", header):
        end = closing(header, found.end()) + 1
        header, original = header[end:], original[end:]
    if found := re.search(r"__launch_bounds__(?=\()", header):  # its brackets may contain calls
        end = closing(header, found.end()) + 1
        header = header[:found.start()] + " " * (end - found.start()) + header[end:]
    if re.match(r"\s*(inline\s+)?namespace\b", header):
        return "", "scope"
    if found := re.match(r"\s*(struct|class|union|enum(?: class)?)\s+(?:alignas\([^)]*\)\s*)?(\w+)", header):
        return found.group(2), "type" if found.group(1).startswith("enum") else "scope"
    for found in re.finditer(r"([\w:~]+|operator\S+)\s*\(", header):
        if found.group(1) in ("alignas", "decltype"):
            continue
        if "=" in header[:found.start()]:
            break
        if header[found.end():found.end() + 1] == '"':  # a test: its title may consist of several strings
            title = re.match(r'(\s*"[^"]*")+', original[found.end():]).group()
            return "".join(re.findall(r'"([^"]*)"', title)), "test"
        return found.group(1), "code"
    found = re.search(r"(\w+)\s*(\[\w*\])?\s*(=.*)?$", header, re.S)
    return (found.group(1) if found else ""), "type"

def definitions(source):
    text, found, scopes, start, i = blanked(source), [], [], 0, 0
    lines = source.split("\n")

    def define(name, begin, end, kind):
        begin += len(text[begin:]) - len(text[begin:].lstrip())
        first, last = source.count("\n", 0, begin), source.count("\n", 0, end)
        while first and re.match(r"\s*//", lines[first - 1]) and not SEPARATOR.match(lines[first - 1]) \
                and not HEADING.match(lines[first - 1]):
            first -= 1
        full = "::".join([s[0] for s in scopes if s[0]] + [name])
        found.append(Definition(name if kind == "test" else full, first, last, kind == "test",
                                kind in ("scope", "type")))
    while i < len(text):
        if text[i] == "{":
            name, kind = what_begins(text[start:i], source[start:i])
            if kind == "scope":
                scopes.append((name, start))
            else:
                end = closing(text, i)
                define(name, start, end, kind)
                i = end
            start = i + 1
        elif text[i] == "}":
            name, begin = scopes.pop()
            if name:
                define(name, begin, i, "scope")
            start = i + 1
        elif text[i] == ";":
            start = i + 1
        elif access := re.compile(r"\b(public|private|protected):(?!:)").match(text, i):
            start = access.end()
            i = start - 1
        i += 1
    return sorted(found)

class Cut:
    """A definition on the page."""
    def __init__(self, kind, path, wanted, station):
        source = (ROOT / path).read_text()
        test, (name, _, number) = wanted[0] == '"', wanted.strip('"').partition("#")
        fits = [d for d in definitions(source) if d.test == test and
                (d.name.startswith(name) if test else d.name == name)]
        fits = fits[int(number) - 1:int(number)] if number else fits
        if len(fits) != 1:
            where = ", ".join(str(d.first + 1) for d in fits) or "none"
            sys.exit(f"{station}: {path} must have one definition of {wanted}; in lines: {where}")
        d = fits[0]
        self.kind, self.path, self.test, self.first, self.last = kind, path, test, d.first + 1, d.last + 1
        self.name, self.is_type = d.name if test else name, d.is_type
        self.scope, _, self.short = d.name.rpartition("::") if not test else ("", "", "")
        lines = source.split("\n")[d.first:d.last + 1]
        dent = min(len(x) - len(x.lstrip()) for x in lines if x.strip() and x[0] != "#")
        self.lines = [x if x[:1] == "#" else x[dent:] for x in lines]
        self.id = f"{kind}-" + re.sub(r"\W+", "-", self.name.lower())[:44].strip("-")

    def rows(self):
        """[(comment, code)]: a comment on lines of its own begins a row. Both are lists of lines."""
        rows, trailing = [([], [])], -1  # trailing: the column of a comment after code, which may go on
        for line in self.lines:
            at = line.find("//")
            if line[:at].strip() or at < 0 or at == trailing:
                rows[-1][1].append(line)
                trailing = at
            elif not SEPARATOR.match(line):
                if rows[-1][1]:
                    rows.append(([], []))
                rows[-1][0].append(line)
        return rows

    def says(self):
        """The first sentence of its comment; else how its code begins."""
        comment, code = self.rows()[0]
        text = " ".join([re.sub(r"^\s*// ?", "", x) for x in comment] or code[:2])
        return re.split(r"(?<=[.:;])\s", text.strip(), maxsplit=1)[0][:220]

# --- HTML

KEYWORDS = set("""auto break case catch class const constexpr continue decltype default do else enum extern false
final for if inline mutable namespace new noexcept nullptr operator override private protected public return
sizeof static static_assert struct switch template this throw true try typename using virtual void while""".split())
TYPES = set("""bool char double float int unsigned size_t int8_t uint8_t int16_t uint16_t int32_t uint32_t
int64_t uint64_t bf16 float2 float4 uint2 uint4 dim3 Real Floats Tensor Values""".split())
TOKEN = re.compile(r'(?P<c>//.*)|(?P<s>"(?:\\.|[^"\\])*")|(?P<p>^\s*#\w+.*)|(?P<n>\b(?:0x[\w.]+(?:[-+]\d+f?)?'
                   r'|\d[\w.]*(?:e[-+]\d+f?)?))|(?P<w>[A-Za-z_]\w*)')

POWER = re.compile(r"(?<=[\w)|])\^(\([^()]*\)|-?\w+(?:[./]\w+)?)")

def superscript(match):
    return f"<sup>{match[1].strip('()')}</sup>".replace("-", "−")

def pre(kind, text):
    """Text as it stands. The style sheet chooses a size of letters with which its longest line, --w, fits."""
    widest = max(len(line) for line in text.split("\n"))
    css = f" class={kind}" if kind else ""
    return f"<pre{css} style=--w:{widest}>{html.escape(text, quote=False)}</pre>"

class Page:
    def __init__(self, cuts):
        self.by_name = collections.defaultdict(list)
        for cut in cuts:
            self.by_name[cut.short].append(cut)

    def target(self, cut, name, before, after):
        """The definition on this page that a name in the code of `cut` means."""
        member, owner = re.search(r"(\.|->)$", before), re.search(r"(\w+)::$", before)
        owner = owner.group(1) if owner else ""
        if name == cut.short or member and cut.test:  # objects in tests may be of any class
            return None
        kinds = ["cpu" if owner == "reference" else "gpu"] if owner in ("reference", "gpu") else \
            ["test", "cpu", "gpu"] if cut.kind == "test" else [cut.kind]
        fits = []
        for to in self.by_name.get(name, []):
            own = to.scope and (cut.scope or cut.name).startswith(to.scope)
            of_object = bool(member) if to.scope and not own and not owner else own or not member
            named = owner in ("", "reference", "gpu") or to.scope.endswith(owner)
            if to.kind in kinds and of_object and named and (to.is_type or re.match(r"\s*\(|<\w", after)):
                fits.append(to)
        return min(fits, key=lambda to: (kinds.index(to.kind), to.path != cut.path), default=None)

    def code(self, cut, line):
        def mark(match):
            kind, word = match.lastgroup, match.group()
            text = html.escape(word, quote=False)
            if kind == "w":
                to = self.target(cut, word, line[:match.start()], line[match.end():])
                if to:
                    return f'<a href="#{to.id}">{text}</a>'
                kind = ("k" if word in KEYWORDS else "q" if re.match(r"__[a-z_]+__$", word) else
                        "t" if word in TYPES or word == cut.short and cut.is_type else
                        "f" if word == cut.short else "")
            return f"<i class={kind}>{text}</i>" if kind else text
        long = {i for run in re.finditer(r"\S{33,}", line) for i in range(run.start(), run.end())}

        def between(begin, end):
            """What stands between tokens. A long line breaks at spaces, and in what is long without a space after a
            bracket or :: and before a dot or arrow."""
            words = html.escape(line[begin:end], quote=False).replace("-&gt;", "<u>-&gt;</u>")
            if end - 1 not in long:
                return words
            return re.sub(r"([({]|::)", r"\1<wbr>", re.sub(r"\.$|<u>", r"<wbr>\g<0>", words))

        out, at = [], 0
        for match in TOKEN.finditer(line):
            out += [between(at, match.start()), mark(match)]
            at = match.end()
        text = "".join(out) + between(at, len(line))
        dent = len(line) - len(line.lstrip())  # kept for who copies it, but shown as padding
        return f"<b style=--n:{dent}><s>{text[:dent]}</s>{text[dent:]}\n</b>" if dent else f"<b>{text}\n</b>"

    def words(self, text, cut=None):
        """Prose of a comment: powers, names of code, links."""
        text = html.escape(text, quote=False).replace("-&gt;", "→")
        text = re.sub(r"\b([A-Za-z])_([A-Za-z0-9])\b", r"\1<sub>\2</sub>", text)
        text = POWER.sub(superscript, text)

        def name(match):
            word, call = match.group(1), match.group(2) or ""
            known = self.by_name.get(word.split("::")[-1], [])
            to = next((c for c in known if not cut or c.kind == cut.kind), None)
            if to and to is not cut and (call or "::" in word or "_" in word):
                return f'<a href="#{to.id}"><code>{word}{call}</code></a>'
            return f"<code>{word}{call}</code>" if call or re.search(r"_|::", word) else match.group()
        text = re.sub(r"(?<![\w/.<>&-])([A-Za-z]\w*(?:::\w+)*)(\(\))?(?![\w/]|\.\w)", name, text)
        return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)

    def note(self, lines, cut):
        """A comment: paragraphs, and what is indented or has columns as a table."""
        out, paragraph, table = [], [], []

        def flush():
            if paragraph:
                out.append(f"<p>{self.words(' '.join(paragraph), cut)}</p>")
            if table:
                least = min(len(x) - len(x.lstrip()) for x in table)
                out.append(pre("", "\n".join(x[least:] for x in table)))
            paragraph.clear(), table.clear()
        for line in lines:
            text = re.sub(r"^\s*// ?(-{3} )?| -{3}$", "", line)
            is_table = re.search(r"^  |\S {3,}\S|=.*\S  \S", text)
            if not text.strip() or bool(is_table) != bool(table):
                flush()
            if text.strip():
                table.extend(re.split(r"(?<=;)  ", text)) if is_table else paragraph.append(text)
        flush()
        return "".join(out)

    def article(self, cut):
        rows = []
        for comment, code in cut.rows():
            while code and not code[-1].strip():
                code.pop()
            dent = len(comment[0]) - len(comment[0].lstrip()) if comment else 0
            body = "".join(self.code(cut, x) for x in code)
            rows.append(f"<div class=row><div class=note style=--n:{dent}>{self.note(comment, cut)}</div>"
                        f"<pre class=code>{body}</pre></div>")
        title = html.escape(cut.name)
        return (f'<article id="{cut.id}" data-say="{html.escape(cut.says())}"><h4><span>{title}</span> '
                f"<small>{cut.path}:{cut.first}–{cut.last}</small></h4>{''.join(rows)}</article>")

# --- The text of a lesson: the part of Markdown that the course uses

FIELD = re.compile(r"^(cpu|gpu|test|paper): (.*)$", re.M)
def inline(text, places):
    """Code, links, bold and italic words of one paragraph. places: where a definition of this lesson stands, by name."""
    parts = re.split(r"(`[^`]+`)", text)
    for i, part in enumerate(parts):
        if part[:1] == "`":
            code = f"<code>{html.escape(part[1:-1], quote=False)}</code>"
            parts[i] = f'<a href="#{places[part[1:-1]]}">{code}</a>' if part[1:-1] in places else code
            continue
        part = html.escape(part, quote=False).replace("&lt;br&gt;", "<br>")
        part = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", part)
        part = re.sub(r"\*([^*\s][^*]*)\*", r"<em>\1</em>", part)
        parts[i] = POWER.sub(superscript, part)
    return re.sub(r"\[([^\]]*)\]\(([^)\s]*)\)", link, "".join(parts))

def link(match):
    words, to = match.groups()
    if to.startswith("http"):
        return f'<a href="{to}">{words}</a>'
    path, _, place = to.partition("#")
    place = re.sub(r"^(\d+)-.*", r"lesson-\1", place)  # on GitHub the title of a lesson
    if not path or path in COURSE:
        return f'<a href="#{place or COURSE[path]}">{words}</a>'
    target = (ROOT / "dev" / path).resolve()
    if not target.exists():
        sys.exit(f"The course links to {path}, which does not exist")
    return f'<a href="{target.as_uri()}{"#" + place if place else ""}">{words}</a>'

def picture(path):
    """An <img> of an SVG file that is written into the page."""
    svg = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<!--.*?-->", "",
                 (ROOT / "dev" / path).read_text(), flags=re.S)
    return "data:image/svg+xml;base64," + base64.b64encode(svg.strip().encode()).decode()

def table(lines, places):
    cells = [[inline(cell.strip(), places) for cell in line.strip().strip("|").split("|")] for line in lines]
    head = "".join(f"<th>{cell}" for cell in cells[0])
    rows = "".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in cells[2:])
    return f"<div class=scrolls><table><tr>{head}{rows}</table></div>"

def equation(lines):
    """Formulas. What stands after a wide gap of a single line may go below it."""
    lines = [line[4:] for line in lines]
    parts = re.split(r" {5,}", lines[0])
    if len(lines) > 1 or len(parts) == 1:
        return pre("eq", "\n".join(lines))
    return f"<div class=parts>{''.join(pre('eq', part) for part in parts)}</div>"

def block(lines, places):
    """HTML of one block: lines between two empty ones."""
    text = "\n".join(lines)
    if lines[0].startswith("    "):
        return equation(lines)
    if lines[0].startswith("|"):
        return table(lines, places)
    if lines[0].startswith("<"):  # <picture>, <details>, </details>
        return re.sub(r'(src|srcset)="([^"]*\.svg)"', lambda m: f'{m[1]}="{picture(m[2])}"', text)
    if re.match(r"(- |\d+\. )", lines[0]):
        items = re.split(r"^(?:- |\d+\. )", text, flags=re.M)[1:]
        kind = "ul" if lines[0][0] == "-" else "ol"
        return f"<{kind}>" + "".join(f"<li>{inline(' '.join(item.split()), places)}" for item in items) + f"</{kind}>"
    css = " class=try" if lines[0].startswith(("**Predict.**", "**Try.**", "**Remember.**")) else ""
    return f"<p{css}>{inline(' '.join(lines), places)}</p>"

def prose(text, places):
    """HTML of a lesson."""
    out = []
    for i, part in enumerate(re.split(r"^```(.*)\n((?:.*\n)*?)```$", text, flags=re.M)):
        if i % 3 == 1:
            source = part.removeprefix("cpp ").strip()
            out.append(f"<p class=from>{html.escape(source)}</p>" if source not in ("", "text") else "")
        elif i % 3 == 2:
            out.append(pre("quoted", part))
        else:
            part = re.sub(r"\n</details>$", "\n\n</details>", part, flags=re.M)
            for lines in re.split(r"\n\s*\n", part.strip("\n")):
                if lines.strip():
                    out.append(block(lines.split("\n"), places))
    return "\n".join(out)

def lessons(text):
    """(title, fields, text) of each lesson."""
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        title, _, rest = part.partition("\n")
        comment = re.match(r"<!--\n(.*?)-->\n", rest, re.S)
        yield title, FIELD.findall(comment[1]) if comment else [], rest[comment.end():] if comment else rest

def breakable(name):
    """A name that may break after each of its words."""
    return re.sub(r"(_|(?<=[a-z])(?=[A-Z]))", r"\1<wbr>", html.escape(name))

def columns(page, mine):
    out = []
    for kind, name in KINDS.items():
        of_kind = [c for c in mine if c.kind == kind]
        if of_kind:
            files = ", ".join(dict.fromkeys(c.path for c in of_kind))
            body = "".join(page.article(c) for c in of_kind)
            out.append(f'<div class="col {kind}"><button class=head><b>{name}</b> <span>{files}</span></button>'
                       f"<div class=body>{body}</div></div>")
    whole = '<button class=whole title="key 1">code alone</button>'
    return f'<div class=cols data-open={mine[0].kind}>{"".join(out)}{whole}</div>' if out else ""

def main(out):
    part_one, part_two = ((ROOT / "dev" / name).read_text() for name in COURSE)
    text = part_one + "\n" + part_two[part_two.index("## "):]
    all_lessons, cuts = [], []
    for title, fields, words in lessons(text):
        mine = [Cut(kind, path, name, title) for kind, value in fields if kind in KINDS
                for path, names in [value.split(": ", 1)] for name in re.findall(r'"[^"]*"|[^\s,][^,]*', names)]
        all_lessons.append((title, dict(fields).get("paper", ""), words, mine))
        cuts += mine
    for cut in cuts:
        for number, other in enumerate([c for c in cuts if c.id == cut.id][1:], 2):
            other.id += f"-{number}"
    page = Page(cuts)
    nav, body = [], []
    for title, paper, words, mine in all_lessons:
        number, name = re.match(r"(?:(\d+)\. )?(.*)", title).groups()
        place = f"lesson-{number}" if number else re.sub(r"\W+", "-", name.lower())  # as on GitHub
        places = {c.short: c.id for c in mine[::-1] if not c.test}
        names = "".join(f'<li><a href="#{c.id}" class={c.kind}>{breakable(c.short or c.name)}</a></li>' for c in mine)
        nav.append(f'<li><a href="#{place}"><b>{number or ""}</b>{name}</a><ul>{names}</ul></li>')
        paper = f"<p class=paper>Paper: section {paper}</p>" if paper[:1].isdigit() else ""
        body.append(f'<section id="{place}"><header><span class=no>{number or ""}</span><h2>{name}</h2>{paper}</header>'
                    f"<div class=idea><div class=say>{prose(words, places)}</div></div>{columns(page, mine)}</section>")
    heading, intro = re.match(r"# ([^\n]*)\n\n(.*?)\n\n## ", text, re.S).groups()
    legend = " ".join(f"<span class={kind}>{name}</span>" for kind, name in KINDS.items())
    css, js = ((ROOT / "dev" / name).read_text() for name in ("read.css", "read.js"))
    out.parent.mkdir(exist_ok=True)
    out.write_text(f"""<!DOCTYPE html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">
<title>{heading}</title><style>{css}</style>
<button id=menu aria-label="lessons">Lessons</button>
<nav><h1><a href="#top">{heading}</a></h1><input type=search placeholder="Search functions  /" aria-label="search functions">
<p class=legend>{legend}</p>
<ol>{"".join(nav)}</ol>
<p class=keys><kbd>j</kbd> <kbd>k</kbd> next, previous <br><kbd>f</kbd> fold a lesson <br><kbd>1</kbd> <kbd>2</kbd>
<kbd>3</kbd> <kbd>4</kbd> text, CPU, GPU, test</p></nav>
<main id=top><div class=intro><h1>{heading}</h1>{prose(intro, {})}</div>{"".join(body)}</main>
<div id=tip hidden></div><script>{js}</script></html>
""")
    numbered = sum(title[0].isdigit() for title, *_ in all_lessons)
    print(f"{out}: {numbered} lessons, {len(cuts)} definitions, {out.stat().st_size // 1000} KB. "
          "Open it in a browser.")

if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/read.html")
