#!/usr/bin/env python3
"""Writes build/read.html, which shows the course beside the code, and build/ladders.html, which shows dev/ladders rung
by rung: `make read`. Standard library only.

The text is that of dev/WALK.md and dev/WALK2.md. A lesson names its functions, types and tests in a comment below
its title, one file a line:

    cpu: reference/rounding.h: encode, decode
    test: test/reference/1_2_codes.cpp: "decode: every code"

The kind that is named first is open at first. Their code is cut out of the sources here, from the comment above a
definition to its closing brace. A name that is missing, or that two definitions have, is an error; name#2 is the
second of several, and the name of a test may be cut short. The style and the script of both pages are dev/read.css
and dev/read.js.

A ladder is one file, which lines of ==== divide into parts. A part begins with its title, such as "Rung 2: ...", and
the comment below it; the rest is its code. What a part says is shown beside its code. The part "Answer to rung 2" is
folded below that rung, and so are "Hints for your rung" and "Answers on paper" below "Your rung" and "On paper".
"Picture: dev/figures/rung5.svg | words" shows that drawing, with the words below it.
"""
import base64
import collections
import html
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COURSE = ["WALK.md", "WALK2.md"]
LADDERS = ["quantize_transpose", "adamw", "norm_to_fp8", "attention"]  # in the order in which to read them
# Where a file of dev/ is shown.
SHOWN = {"WALK.md": "read.html#top", "WALK2.md": "read.html#lesson-10", "ladders/README.md": "ladders.html#top",
         **{f"ladders/{name}.cu": f"ladders.html#{name}" for name in LADDERS}}
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
    """A definition on the page, with the lines of the file that are shown for it."""
    def __init__(self, kind, path, d, lines):
        self.kind, self.path, self.test, self.first, self.last = kind, path, d.test, d.first + 1, d.last + 1
        self.name, self.is_type = d.name, d.is_type
        self.scope, _, self.short = d.name.rpartition("::") if not d.test else ("", "", "")
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
            elif not SEPARATOR.match(line) and "clang-format o" not in line:
                if rows[-1][1]:
                    rows.append(([], []))
                rows[-1][0].append(line)
        return rows

    def says(self):
        """The first sentence of its comment; else how its code begins."""
        comment, code = self.rows()[0]
        text = " ".join([re.sub(r"^\s*// ?", "", x) for x in comment] or code[:2])
        return re.split(r"(?<=[.:;])\s", text.strip(), maxsplit=1)[0][:220]

def find_cut(kind, path, wanted, station):
    source = (ROOT / path).read_text()
    test, (name, _, number) = wanted[0] == '"', wanted.strip('"').partition("#")
    fits = [d for d in definitions(source) if d.test == test and
            (d.name.startswith(name) if test else d.name == name)]
    fits = fits[int(number) - 1:int(number)] if number else fits
    if len(fits) != 1:
        where = ", ".join(str(d.first + 1) for d in fits) or "none"
        sys.exit(f"{station}: {path} must have one definition of {wanted}; in lines: {where}")
    return Cut(kind, path, fits[0], source.split("\n")[fits[0].first:fits[0].last + 1])

# --- HTML

KEYWORDS = set("""auto break case catch class const constexpr continue decltype default do else enum extern false
final for if inline mutable namespace new noexcept nullptr operator override private protected public return
sizeof static static_assert struct switch template this throw true try typename using virtual void while""".split())
TYPES = set("""bool char double float int unsigned size_t int8_t uint8_t int16_t uint16_t int32_t uint32_t
int64_t uint64_t bf16 float2 float4 uint2 uint4 dim3 Real Floats Tensor ChunkValues""".split())
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
    if re.fullmatch(r"\*[^*]+\*", text):  # a caption, which may contain code
        return f"<em>{inline(text[1:-1], places)}</em>"
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
    if path in SHOWN or not path:
        page, _, begin = SHOWN.get(path, "").partition("#")
        return f'<a href="{page}#{place or begin}">{words}</a>'
    target = (ROOT / "dev" / path).resolve()
    if not target.exists():
        sys.exit(f"The course links to {path}, which does not exist")
    return f'<a href="{target.as_uri()}{"#" + place if place else ""}">{words}</a>'

def picture(path):
    """The address of an SVG file that is written into the page."""
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
    if lines[0].startswith("<"):  # <img>, <details>, </details>
        return re.sub(r'src="([^"]*\.svg)"', lambda m: f'src="{picture(m[1])}"', text)
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
            out.append(f"<p class=from>{html.escape(source)}</p>" if source not in ("", "text", "cpp") else "")
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

def course():
    """The title, the introduction, and for each lesson its entry in the list of lessons and its section."""
    part_one, part_two = ((ROOT / "dev" / name).read_text() for name in COURSE)
    text = part_one + "\n" + part_two[part_two.index("## "):]
    all_lessons, cuts = [], []
    for title, fields, words in lessons(text):
        mine = [find_cut(kind, path, name, title) for kind, value in fields if kind in KINDS
                for path, names in [value.split(": ", 1)] for name in re.findall(r'"[^"]*"|[^\s,][^,]*', names)]
        all_lessons.append((title, dict(fields).get("paper", ""), words, mine))
        cuts += mine
    distinguish(cuts)
    page = Page(cuts)
    entries, sections = [], []
    for title, paper, words, mine in all_lessons:
        number, name = re.match(r"(?:(\d+)\. )?(.*)", title).groups()
        place = f"lesson-{number}" if number else re.sub(r"\W+", "-", name.lower())  # as on GitHub
        places = {c.short: c.id for c in mine[::-1] if not c.test}
        paper = f"<p class=paper>Paper: section {paper}</p>" if paper[:1].isdigit() else ""
        entries.append(entry(place, number or "", name, mine))
        sections.append(section(place, number or "", name, paper, prose(words, places), columns(page, mine)))
    heading, intro = re.match(r"# ([^\n]*)\n\n(.*?)\n\n## ", text, re.S).groups()
    return heading, prose(intro, {}), entries, sections

def distinguish(cuts):
    """Gives every definition an id of its own."""
    for cut in cuts:
        for number, other in enumerate([c for c in cuts if c.id == cut.id][1:], 2):
            other.id += f"-{number}"

def entry(place, number, name, cuts, css=""):
    names = "".join(f'<li><a href="#{c.id}" class={c.kind}>{breakable(c.short or c.name)}</a></li>' for c in cuts)
    return f'<li class="{css}"><a href="#{place}"><b>{number}</b>{name}</a><ul>{names}</ul></li>'

def section(place, number, name, below_title, text, code):
    return (f'<section id="{place}"><header><span class=no>{number}</span><h2>{name}</h2>{below_title}</header>'
            f"<div class=idea><div class=say>{text}</div></div>{code}</section>")

# --- Ladders

class Part:
    """What stands between two lines of ====: a title, what it says, and code."""
    def __init__(self, path, source, first, last, title):
        lines = source.split("\n")[first:last]
        says = next((i for i, line in enumerate(lines) if line[:2] != "//"), len(lines))
        self.title = title or lines[0].removeprefix("// ")
        self.words = [line[3:] for line in lines[0 if title else 1:says]]
        self.cuts, begin = [], first + says
        inside = [d for d in definitions(source) if begin <= d.last < last]
        outer = [d for d in inside if not any(o.first < d.first and d.last < o.last for o in inside)]
        for d in sorted(outer, key=lambda d: d.last):  # what stands above a definition is shown with it
            while not lines[begin - first]:
                begin += 1
            self.cuts.append(Cut("gpu", path, d._replace(first=begin), lines[begin - first:d.last + 1 - first]))
            begin = d.last + 1
        rest = [line for line in lines[begin - first:] if line and not line.startswith("}")]
        if self.cuts and rest:
            sys.exit(f"{path}: what stands after the last definition of a part is not shown: {rest[0]}")

def parts_of(name):
    path = f"dev/ladders/{name}.cu"
    source = (ROOT / path).read_text()
    lines = source.split("\n")
    borders = [i for i, line in enumerate(lines) if SEPARATOR.match(line)] + [len(lines)]
    head = Part(path, source, 0, borders[0], f"{name}.cu")
    return [head] + [Part(path, source, a + 1, b, "") for a, b in zip(borders, borders[1:])]

def spoken(words, page):
    """HTML of what a part says: paragraphs, lists, and tables and drawings, which are indented."""
    text = re.sub(r"(?<=\S)\n(?=  - )", "\n\n", "\n".join(words))
    out = []
    for lines in (chunk.split("\n") for chunk in re.split(r"\n\s*\n", text.strip("\n"))):
        joined = " ".join(" ".join(lines).split())
        if lines[0].startswith("  - "):
            out.append("<ul>" + "".join(f"<li>{page.words(item)}" for item in joined[2:].split(" - ")) + "</ul>")
        elif lines[0].startswith("  "):
            out.append(pre("quoted", "\n".join(line[2:] for line in lines)))
        elif found := re.match(r"Picture: dev/(\S+)\.svg \| (.*)", joined):
            out.append(f'<img alt="{html.escape(found[2])}" src="{picture(found[1] + ".svg")}">'
                       f"<p><em>{page.words(found[2])}</em></p>")
        elif re.match(r"\d+\. ", lines[0]):  # hints, each of which is opened by itself
            for number, hint in enumerate(re.split(r"(?:^| )\d\. ", joined)[1:], 1):
                out.append(f"<details><summary>Hint {number}</summary><p>{page.words(hint)}</p></details>")
        else:
            css = " class=try" if joined.startswith("Predict:") else ""
            lead, rest = re.match(r"(What changes:|Counted:|Predict:|Why:|(?:What|Who)(?: \w+){1,3}\.)?(.*)", joined).groups()
            rest = re.sub(r"\*([\w-]+)\*", r"<em>\1</em>", page.words(rest))
            out.append(f"<p{css}>{f'<b>{lead}</b>' if lead else ''}{rest}</p>")
    return "\n".join(out)

def ladder(name):
    """For each part of a ladder that is not folded below another: its entry and its section."""
    parts = parts_of(name)
    cuts = [cut for part in parts for cut in part.cuts]
    for cut in cuts:
        cut.id = f"{name}-{cut.id}"
    distinguish(cuts)
    page = Page(cuts)
    below = {}  # by the title of the part below which it is folded, in lower case
    for part in parts:
        if found := re.match(r"(Answer to|Answers|Hints for) (.*)", part.title):
            below[found[2]] = (found[1].split()[0], part)
    kernels = {cut.short: cut for cut in cuts if "__global__" in "".join(cut.lines)}
    entries, sections = [], []
    for part in parts:
        if re.match("(Answer|Hints) ?", part.title) and not part.cuts:
            continue
        rung = re.match(r"Rung (\d+): (.*)", part.title)
        number, title = rung.groups() if rung else ("", part.title)
        title = title[:1].upper() + title[1:] if rung else title
        folded = below.pop(part.title.split(":")[0].lower(), None)
        if rung and not folded:
            sys.exit(f"dev/ladders/{name}.cu: rung {number} has no part \"Answer to rung {number}\"")
        text = spoken(part.words, page)
        if folded:
            kind, answer = folded
            inside = spoken(answer.words, page)
            text += inside if kind == "Hints" else f"<details><summary>{kind}</summary>{inside}</details>"
        place = name if part is parts[0] else name + "-" + re.sub(r"\W+", "-", part.title.split(":")[0].lower())
        entries.append(entry(place, number, html.escape(title) if rung else breakable(title), part.cuts,
                             "ladder" if part is parts[0] else ""))
        where = f"<p class=paper>{name}.cu, rung {number}</p>" if rung else ""
        code = columns(page, part.cuts)
        if rung:  # a kernel of an earlier rung that is launched again is shown again, without its id
            launched = re.findall(r"(\w+)(?:<[^<>]*>)?<<<", "\n".join(line for cut in part.cuts for line in cut.lines))
            again = [kernels[kernel] for kernel in dict.fromkeys(launched) if kernels[kernel] not in part.cuts]
            articles = "".join(page.article(cut).replace(f'id="{cut.id}" ', "", 1) for cut in again)
            code = code.replace("</div></div><button class=whole", f"{articles}</div></div><button class=whole")
        sections.append(section(place, number, html.escape(title), where, text, code))
    if below:
        sys.exit(f"dev/ladders/{name}.cu has answers or hints for parts that it does not have: {', '.join(below)}")
    return entries, sections

def ladders():
    """As course(): CUDA on one page, then each ladder."""
    text = re.sub(r"\]\((\.\./)?([\w./]+)\)", lambda m: f"]({m[2] if m[1] else 'ladders/' + m[2]})",
                  (ROOT / "dev/ladders/README.md").read_text())  # links from dev/ladders become links from dev
    heading, intro = re.match(r"# ([^\n]*)\n\n(.*?)\n\n## ", text, re.S).groups()
    entries, sections = [], []
    for title, _, words in lessons(text):
        place = re.sub(r"\W+", "-", title.lower())
        entries.append(entry(place, "", title, []))
        sections.append(section(place, "", title, "", prose(words, {}), ""))
    for name in LADDERS:
        more_entries, more_sections = ladder(name)
        entries += more_entries
        sections += more_sections
    return heading, prose(intro, {}), entries, sections

# --- The pages

def write_page(out, css_class, menu, legend, heading, intro, entries, sections):
    css, js = ((ROOT / "dev" / name).read_text() for name in ("read.css", "read.js"))
    out.parent.mkdir(exist_ok=True)
    text = f"""<!DOCTYPE html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">
<title>{heading}</title><style>{css}</style>
<button id=menu aria-label="contents">{menu}</button>
<nav><h1><a href="#top">{heading}</a></h1><input type=search placeholder="Search functions  /" aria-label="search functions">
<p class=legend>{legend}</p>
<ol>{"".join(entries)}</ol>
<p class=keys><kbd>j</kbd> <kbd>k</kbd> next, previous <br><kbd>f</kbd> fold a lesson <br><kbd>1</kbd> <kbd>2</kbd>
<kbd>3</kbd> <kbd>4</kbd> text, CPU, GPU, test</p></nav>
<main id=top class="{css_class}"><div class=intro><h1>{heading}</h1>{intro}</div>{"".join(sections)}</main>
<div id=tip hidden></div><script>{js}</script></html>
"""
    out.write_text(text.replace(f'href="{out.name}#', 'href="#'))

def main(out):
    legend = " ".join(f"<span class={kind}>{name}</span>" for kind, name in KINDS.items())
    write_page(out, "", "Lessons", legend, *course())
    write_page(out.with_name("ladders.html"), "ladders", "Ladders", "", *ladders())
    print(f"{out}: the course. {out.with_name('ladders.html')}: the ladders. Open them in a browser.")

if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/read.html")
