// tokenize.cpp - data/tokenize.py: what it reads, which tokens of conversations count, how it packs and
// divides. The last test has transformers itself; the others have a small one of the tests.
#include <set>

#include "../help/program.h"

using namespace coat;
using namespace coat::test;

const bool NO_TRANSFORMERS = std::system("python3 -c 'import transformers' >/dev/null 2>&1") != 0;

// Token t below 256 is a byte, spelled as in SentencePiece or, with BYTE_LEVEL, as in GPT-2. model/special
// lists the special tokens that follow, and model/template is the chat template as an expression of Python.
// With FIRST_SPACE the tokenizer puts a space before every text. It takes no text of a million characters.
const char* const TRANSFORMERS = R"py(
import collections, json, re
from transformers.utils import chat_template_utils
Added = collections.namedtuple("Added", "content special")
OWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in OWN]
class AutoTokenizer:
    @staticmethod
    def from_pretrained(name):
        self = AutoTokenizer()
        self.special = open(name + "/special").read().split("\n")
        self.template = open(name + "/template").read()
        self.eos_token_id, self.eos_token, self.bos_token_id = 258, "<|end|>", 257
        self.added_tokens_decoder = {256 + i: Added(s, True) for i, s in enumerate(self.special)}
        return self
    def get_vocab(self):
        byte_level = "BYTE_LEVEL" in self.template
        own = lambda t: chr(t) if t in OWN else chr(256 + OTHERS.index(t))
        spelled = {own(t) if byte_level else "<0x%02X>" % t: t for t in range(256)}
        return {**spelled, **{s: 256 + i for i, s in enumerate(self.special)}}
    def apply_chat_template(self, messages, tools, tokenize, add_generation_prompt, date_string):
        assert tokenize is False and date_string and len(messages) > 0
        return eval(self.template, dict(messages=messages, add_generation_prompt=add_generation_prompt,
                                        tools=tools, datetime=chat_template_utils.datetime, json=json))
    def __call__(self, text, add_special_tokens, verbose, return_offsets_mapping=False,
                 split_special_tokens=False):
        if isinstance(text, list):
            found = [self(t, add_special_tokens, verbose, False, split_special_tokens) for t in text]
            return {"input_ids": [f["input_ids"] for f in found]}
        assert len(text) < 1000000
        ids, offsets, at = [257] if add_special_tokens else [], [], 0
        if "FIRST_SPACE" in self.template:
            ids.append(32), offsets.append((0, 0))
        for part in re.split("(<[|].*?[|]>)", text):
            if part in self.special and not split_special_tokens:
                ids.append(256 + self.special.index(part)), offsets.append((at, at + len(part)))
            else:
                ids += part.encode()
                if return_offsets_mapping:
                    offsets += [(at + i, at + i + 1) for i, c in enumerate(part) for byte in c.encode()]
            at += len(part)
        return {"input_ids": ids, "offset_mapping": offsets}
)py";
const std::string CHAT =
    "''.join('<|' + m['role'] + '|>' + m['content'] + '<|end|>\\n' for m in messages)"
    " + ('<|assistant|>' if add_generation_prompt else '')";

static Ended tokenize_py(const Folder& folder, const std::string& flags, const std::string& limit = "") {
    const std::string script = " PYTHONPATH=. python3 '" + fs::absolute("data/tokenize.py").string() + "' ";
    return shell(folder, limit + "TRANSFORMERS_VERBOSITY=error" + script + flags);
}

namespace {

// A folder with a model's tokenizer and the package; records go into c.jsonl, or into `file`.
struct ChatFolder : Folder {
    ChatFolder() {
        write("transformers/__init__.py", TRANSFORMERS);
        write("transformers/utils/chat_template_utils.py", "from datetime import datetime");
        write("model/special", "<|user|>\n<|assistant|>\n<|end|>");
        write("model/template", CHAT);
    }
    Ended run(const std::string& flags) const { return tokenize_py(*this, flags); }
    Ended tokenize(const std::string& records, const std::string& flags = "--seq 32",
                   const std::string& file = "c.jsonl") const {
        write(file, records);
        return run("--tokenizer model --out tokens " + file + " " + flags);
    }
    // The text of a token file, with what counts in square brackets; a line is a window without padding.
    std::string windows(const std::string& name = "train") const {
        const Corpus corpus = load_corpus(*this / "tokens");
        const TokenStream& stream = name == "train" ? corpus.train : corpus.validation;
        Tokens tokens(stream.size()), targets(stream.size());
        stream.read(0, stream.size(), tokens.data(), targets.data());
        std::string text;
        bool inside = false;
        for (int64_t i = 0; i + 1 < stream.size(); i++) {
            const bool counts = targets[i] >= 0;
            if (inside != counts) text += inside ? "]" : "[";
            text += corpus.vocabulary.decode({tokens[i]});
            inside = counts;
            if ((i + 1) % corpus.seq) continue;
            if (inside) text += "]";
            while (text.ends_with("<|end|>")) text.resize(text.size() - strlen("<|end|>"));
            text += "\n";
            inside = false;
        }
        return text;
    }
    Ended check(const std::string& records, const std::string& flags, const std::string& expected,
                const std::string& file = "c.jsonl") const {
        CAPTURE(file);
        const Ended ended = tokenize(records, flags, file);
        require_success(ended);
        CHECK(windows() == expected + "\n");
        return ended;
    }
};

}  // namespace

// A conversation in which user and assistant take turns. `more`: fields of the first answer.
static std::string chat(const std::vector<std::string>& said, const std::string& more = "") {
    std::string all;
    for (size_t i = 0; i < said.size(); i++)
        all += concat(i ? "," : "", R"({"role": ")", i % 2 ? "assistant" : "user", R"(", "content": ")",
                      said[i], "\"", i == 1 ? more : "", "}");
    return "{\"messages\": [" + all + "]}\n";
}
const std::string HELD = chat({"held", "out"});

PYTHON_TEST_CASE("tokenize.py: what the assistant says counts with the end of its turn") {
    const ChatFolder folder;
    const Ended ended = folder.check(chat({"hi", "A\\u00e9 ", "b", "C"}) + HELD, "--seq 32",
                                     "<|user|>hi<|end|>\n<|assistant|>[A\xC3\xA9 <|end|>]\n"
                                     "<|user|>b<|end|>\n<|assistant|>[C<|end|>]\n");
    CHECK(folder.windows("val") == "<|user|>held<|end|>\n<|assistant|>[out<|end|>]\n\n");
    CHECK(contains(ended.out, "train.bin: 33 tokens, 7 count"));
    // A token that begins in the question and ends in the answer counts; the first of a text never does.
    folder.write("model/template",
                 "'' if not messages else messages[0]['content'] + messages[1]['content']"
                 " if messages[1:] else '' if add_generation_prompt else messages[0]['content']");
    folder.check(chat({"", "abc"}) + chat({"", "out"}), "--seq 4", "a[bc]");
    folder.write("model/template", "'a<|us' + (messages[1]['content'] if messages[1:] else '')");
    folder.check(chat({"x", "er|>b"}) + HELD, "--seq 9", "a[<|user|>b]");
}

PYTHON_TEST_CASE("tokenize.py: an answer is found where a template treats it in a way of its own") {
    const ChatFolder folder;
    const std::string two = chat({"q", "A", "r", "B"}) + HELD;
    auto check = [&](const std::string& as, const std::string& records, const std::string& expected) {
        folder.write("model/template", as);
        folder.check(records, "--seq 24", expected);
    };
    // As Qwen3 and DeepSeek-R1 do: only the last answer has thoughts; the generation prompt may begin them.
    const std::string think =
        "''.join('<|' + m['role'] + '|>' + (m['content'] if m['role'] == 'user' else"
        " ('(' + m['content'].split(')')[0].strip('(') * (')' in m['content']) + ')'"
        "  if m is messages[-1] else '') + m['content'].split(')')[-1]) + '<|end|>' for m in messages)"
        " + ('<|assistant|>' if add_generation_prompt else '')";
    const std::string before = "<|user|>q<|end|><|assistant|>[A<|end|>]<|user|>r<|end|><|assistant|>";
    check(think, chat({"q", "(why)A", "r", "B"}) + HELD, before + "[()B<|end|>]");
    check(think + " + ('(' if add_generation_prompt else '')", two, before + "([)B<|end|>]");
    // A system message that moves into the last question.
    check(
        "''.join(('sys ' if m['role'] == 'user' and m is [n for n in messages if n['role'] == 'user'][-1]"
        " else '') + m['content'] + '<|end|>' * (m['role'] == 'assistant') for m in messages)",
        two, "q[A<|end|>]sys r[B<|end|>]");
    // A weight of 0; arguments that are text.
    check(CHAT, chat({"q", "A", "r", "B"}, R"(, "weight": 0)") + HELD,
          "<|user|>q<|end|>\n<|assistant|>A<|end|>\n<|user|>r<|end|>\n<|assistant|>[B<|end|>]\n");
    const char* const call = R"(, "tool_calls": [{"function": {"name": "f", "arguments": "{\"x\": 6}"}}])";
    check(
        "''.join(m['content'] + ''.join(str(c['function']['arguments']['x'] + 1)"
        " for c in m.get('tool_calls', [])) + '<|end|>' for m in messages)",
        chat({"q", "A", "r", "B"}, call) + HELD, "q<|end|>[A7<|end|>]r<|end|>[B<|end|>]");
}

PYTHON_TEST_CASE("tokenize.py: records of every known form and texts among them") {
    const ChatFolder folder;
    const std::string expected = "<|user|>a\n\nb<|end|>\n<|assistant|>[c<|end|>]\n";
    const std::string openai =
                          R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a\n"}, )"
                          R"({"text": "\nb"}]}, {"role": "assistant", "content": "c"}]})"
                          "\n",
                      share = R"({"conversations": [{"from": "human", "value": "a\n\nb"}, )"
                              R"({"from": "gpt", "value": "c"}], "id": 7})",
                      alpaca = R"({"instruction": "a", "input": "b", "output": "c"})",
                      held = R"({"instruction": "held", "input": "", "output": "out"})";
    for (const auto& [file, content] : {std::pair{"o.jsonl", openai + HELD},
                                        {"s.jsonl", share + "\n" + HELD},
                                        {"a.json", "[" + alpaca + ",\n " + held + "]"},
                                        {"lines.json", "\xEF\xBB\xBF" + alpaca + "\n\n" + held}})
        folder.check(content, "--seq 32", expected, file);
    if (std::system("python3 -c 'import pyarrow' > /dev/null 2>&1") == 0) {
        folder.write("p.py", R"py(
import pyarrow, pyarrow.parquet
said = lambda role, text, **more: dict(role=role, content=text, **more)
rows = [[said("user", "a\n\nb", weight=1), said("assistant", "c")],  # the other weights are null
        [said("user", "held"), said("assistant", "out")]]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist([dict(messages=row) for row in rows]), "p.parquet")
)py");
        require_success(shell(folder, "python3 p.py"));
        require_success(folder.run("--tokenizer model --out tokens --seq 32 p.parquet"));
        CHECK(folder.windows() == expected + "\n");
    }
    // Texts; special tokens stay text there.
    const std::string texts = "\xEF\xBB\xBF{\"text\": \"<|user|>one\"}\n{\"text\": \"two\"}\n";
    require_success(folder.tokenize(texts, "", "t.jsonl"));
    CHECK(load_corpus(folder / "tokens").train.size() == 1 + 9 + 1 + 2);
}

PYTHON_TEST_CASE(
    "tokenize.py: an answer ends with the control tokens that follow it also in the middle of a "
    "conversation") {
    const ChatFolder folder;
    const std::string two = chat({"q", "A", "r", "B"}) + HELD;
    // As Phi 3 does: the end of an answer, and more where the conversation ends.
    const std::string phi =
        "''.join('<|' + m['role'] + '|>' + m['content'] + '<|end|>' for m in messages) + "
        "('<|assistant|>' if add_generation_prompt else '<|stop|>')";
    folder.write("model/special", "<|user|>\n<|assistant|>\n<|end|>\n<|stop|>");
    folder.write("model/template", phi);
    folder.check(two, "--seq 24",
                 "<|user|>q<|end|><|assistant|>[A<|end|>]<|user|>r<|end|><|assistant|>[B<|end|><|stop|>]");
    // As gpt-oss does: another token where the conversation ends.
    const std::string other_end =
        "''.join(m['role'][0] + ':' + m['content'] + ('<|stop|>' if m is messages[-1] and m['role'] != 'user'"
        " and not add_generation_prompt else '<|end|>') for m in messages) + ('a:' * add_generation_prompt)";
    folder.write("model/template", other_end);
    folder.check(two, "--seq 24", "u:q<|end|>a:[A<|end|>]u:r<|end|>a:[B<|stop|>]");
    // Nothing that could be the end of an answer follows it in the middle.
    folder.write("model/template",
                 "''.join(m['content'] + ('<|end|>' if m is messages[-1] else '/') for m in messages)");
    const Ended ended = folder.check(two, "--seq 24", "q/[A]/r/[B<|end|>]");
    CHECK(contains(ended.out, "ends an answer with '<|end|>' only where the conversation ends"));
    // The other answer begins as the generation prompt does. This must not hide where it begins.
    const std::string thoughts =
        "''.join(m['role'][0] + ' ' + ('<think>' if m is messages[-1] and m['role'] != 'user' else '') +"
        " m['content'] + '<|end|>' for m in messages) + ('a <think>' if add_generation_prompt else '')";
    folder.write("model/template", thoughts);
    folder.check(chat({"q", "<thank you", "r", "B"}) + HELD, "--seq 40",
                 "u q<|end|>a [<thank you<|end|>]u r<|end|>a <think>[B<|end|>]");
    // An answer that the template does not show, and one that comes first.
    folder.write("model/template",
                 "''.join(m['content'] + '<|end|>' for m in messages if m['content'] != 'A')");
    CHECK(contains(folder.check(two, "--seq 24", "q<|end|>r<|end|>[B<|end|>]").out,
                   "does not show all answers"));
    folder.write("model/template", CHAT);
    folder.check(
        R"({"messages": [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "q"}]})"
        "\n" +
            HELD,
        "--seq 24", "<|assistant|>[hello<|end|>]\n<|user|>q<|end|>\n");
}

PYTHON_TEST_CASE(
    "tokenize.py: conversations with tool calls have the text that their template makes of them") {
    const ChatFolder folder;
    const auto record = [](const std::string& arguments, const std::string& tools = "") {
        return R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": null, )"
               R"("tool_calls": [{"id": "i", "function": {"name": "f", "arguments": )" +
               arguments +
               R"(}}]}, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "A"}])" + tools +
               "}\n";
    };
    const std::string object = R"({"x": 6})", text = R"("{\"x\": 6}")";
    const auto check = [&](const std::string& as, const std::string& given, const std::string& expected) {
        CAPTURE(as);
        folder.write("model/template", as);
        folder.check(given + HELD, "--seq 60", expected);
    };
    const std::string function = "m['tool_calls'][0]['function']", calls = "m.get('tool_calls')",
                      others = " else m['content']) + '<|end|>' for m in messages)";
    // User and assistant must take turns, but for calls and their results (Mistral).
    const std::string turns =
        "''.join(m['role'][0] + ':' + (json.dumps(" + function + ") if " + calls + others +
        " if all((m['role'] == 'user') == (i % 2 == 0) for i, m in enumerate(m for m in messages"
        " if m['role'] != 'tool' and not m.get('tool_calls'))) else 1 / 0";
    const std::string expected =
        R"(u:q<|end|>[a:{"name": "f", "arguments": {"x": 6}}<|end|>]t:r<|end|>[a:A<|end|>])";
    for (const std::string& arguments : {object, text}) check(turns, record(arguments), expected);
    // The arguments must be text (DeepSeek); then both kinds become text. Or they must be an object.
    const std::string as_text = "''.join((" + function + "['arguments'] + '' if " + calls + others,
                      as_object = "''.join((str(" + function + "['arguments']['x'] + 1) if " + calls + others;
    for (const std::string& arguments : {object, text}) {
        check(as_text, record(arguments), R"(q<|end|>[{"x": 6}<|end|>]r<|end|>[A<|end|>])");
        check(as_object, record(arguments), "q<|end|>[7<|end|>]r<|end|>[A<|end|>]");
    }
    check(as_text, record(R"("{ \"x\":6 }")"), "q<|end|>[{ \"x\":6 }<|end|>]r<|end|>[A<|end|>]");
    // A call must not be the last message; a call without arguments; a content that must not be missing.
    check(as_object + " if not messages[-1].get('tool_calls') else 1 / 0", record(object),
          "q<|end|>[7<|end|>]r<|end|>[A<|end|>]");
    check("''.join((" + function + "['name'] if " + calls + others, record("{}"),
          "q<|end|>[f<|end|>]r<|end|>[A<|end|>]");
    check("''.join((m['content'] or 'call') + '<|end|>' for m in messages)", record(object),
          "q<|end|>[call<|end|>]r<|end|>[A<|end|>]");
    // Tools: a list; text of JSON; a list of such texts.
    const std::string tool = R"({"type": "function", "function": {"name": "f"}})",
                      quoted = R"("{\"type\": \"function\", \"function\": {\"name\": \"f\"}}")",
                      with_tools =
                          "tools[0]['function']['name'] + ':' + " + as_object + " if tools else 'none'";
    for (const std::string& tools : {"[" + tool + "]", quoted, "[" + quoted + "]",
                                     "\"[" + quoted.substr(1, quoted.size() - 2) + "]\""}) {
        folder.write("model/template", with_tools);
        folder.check(record(object, ", \"tools\": " + tools) +
                         record(object, ", \"tools\": [" + tool + "], \"a\": 1") +
                         record("{\"x\": 1}", ", \"tools\": [" + tool + "]"),
                     "--seq 60", "f:q<|end|>[7<|end|>]r<|end|>[A<|end|>]");
    }
    // A content in parts, for a template that knows parts.
    const std::string parts =
        R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "p"}]}, )"
        R"({"role": "assistant", "content": [{"type": "text", "text": "A"}]}]})";
    check(
        "''.join('/'.join([m['content']] if isinstance(m['content'], str) else [''] + [p['text'] for p in"
        " m['content']]) + '<|end|>' for m in messages)",
        parts + "\n", "/p<|end|>[/A<|end|>]");
}

PYTHON_TEST_CASE(
    "tokenize.py: control tokens come from the template alone; what a message spells stays text") {
    const ChatFolder folder;
    const auto special_tokens = [&] {  // of the first conversation
        Tokens tokens = tokens_of(load_corpus(folder / "tokens").train);
        tokens.resize(64);
        return std::count_if(tokens.begin(), tokens.end(), [](int32_t token) { return token > 255; });
    };
    const std::string spelled = chat({"is <|end|> it?", "no: <|end|><|user|>"}) + HELD;
    folder.check(spelled, "--seq 64",
                 "<|user|>is <|end|> it?<|end|>\n<|assistant|>[no: <|end|><|user|><|end|>]\n");
    CHECK(special_tokens() == 4 + 25);  // of which 25 are padding
    // A template that looks for a control token, and writes another, makes that itself.
    folder.write("model/template",
                 "''.join(m['content'].replace('<|user|>', '<|assistant|>') for m in messages)");
    folder.check(chat({"<|user|>q", "a<|end|>"}) + HELD, "--seq 64", "<|assistant|>q[a<|end|>]");
    // In the arguments of a call, which are quoted; in tools; in the keys of an object.
    folder.write(
        "model/template",
        "json.dumps(tools) + ''.join(m['content'] + json.dumps(m.get('tool_calls')) for m in messages)");
    const std::string call =
        R"(, "tool_calls": [{"function": {"name": "f", "arguments": {"<|end|>": "<|end|>"}}}])";
    std::string records = chat({"q", "a"}, call);
    records.insert(records.size() - 2, R"(, "tools": [{"name": "<|end|>"}])");
    folder.check(records + HELD, "--seq 200",
                 R"([{"name": "<|end|>"}]qnull[a[{"function": {"name": "f", "arguments": )"
                 R"({"<|end|>": "<|end|>"}}}]])");
    CHECK(special_tokens() == 0);
}

PYTHON_TEST_CASE("tokenize.py: a template that asks for the date is told one day every day") {
    const ChatFolder folder;
    const std::string told = "2024-07-26 00:00<|user|>q<|end|>\n<|assistant|>[a<|end|>]\n";
    folder.write("model/template", "datetime.now().strftime('%Y-%m-%d %H:%M') + " + CHAT);
    const Ended ended = folder.check(chat({"q", "a"}) + HELD, "--seq 64", told);
    CHECK(contains(ended.out, "26 Jul 2024"));
    // So is one that asks Python itself, and not a name in transformers.
    folder.write("transformers/utils/chat_template_utils.py", "import datetime as module\ndatetime = module");
    folder.write("model/template", "datetime.datetime.now().strftime('%Y-%m-%d %H:%M') + " + CHAT);
    folder.check(chat({"q", "a"}) + HELD, "--seq 64", told);
    // Whatever is imported has the true time. pandas, which transformers may import, crashes without it.
    folder.write("transformers/utils/chat_template_utils.py",
                 "import datetime as module\ndatetime = module\n"
                 "assert module.datetime.__module__ == 'datetime'");
    folder.check(chat({"q", "a"}) + HELD, "--seq 64", told);
}

PYTHON_TEST_CASE("tokenize.py: system prompts and history are used and other columns with text are named") {
    const ChatFolder folder;
    const std::string user = "<|user|>a<|end|>\n", answer = "<|assistant|>[c<|end|>]\n",
                      system = "<|system|>S<|end|>\n", more = R"("id": 7, "none": null, "note": " ", )";
    const auto check = [&](const std::string& record, const std::string& expected) {
        const Ended ended = folder.check("{" + more + record + "}\n" + HELD, "--seq 90", expected);
        CHECK(!contains(ended.out, "columns that are not used"));
    };
    const std::string
        share = R"("conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "c"}])",
        openai = R"("messages": [{"role": "user", "content": "a"}, )"
                 R"({"role": "assistant", "content": "c"}])",
        alpaca = R"("instruction": "a", "input": "", "output": "c")";
    for (const std::string& record : {share, openai, alpaca}) {
        check(R"("system": "S", )" + record, system + user + answer);
        check(R"("system_prompt": "S", )" + record, system + user + answer);
        check(R"("system": "", "history": [], )" + record, user + answer);
        check(R"("system": "S", "history": [["h", "i"]], )" + record,
              system + "<|user|>h<|end|>\n<|assistant|>[i<|end|>]\n" + user + answer);
    }
    check(R"("history": "[[\"h\", \"i\"]]", )" + alpaca,
          "<|user|>h<|end|>\n<|assistant|>[i<|end|>]\n" + user + answer);
    // A system message among the messages counts more than the column, which is named then.
    const std::string both =
        R"({"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "a"}, )"
        R"({"role": "assistant", "content": "c"}], "system": "T", "meta": {"from": ["x"]}})";
    const Ended named = folder.check(both + "\n" + HELD, "--seq 90", system + user + answer);
    CHECK(contains(named.out, "columns that are not used: system, meta (system stands in c.jsonl:1)"));
    require_success(
        folder.tokenize("{\"text\": \"a\", \"title\": \"b\"}\n{\"text\": \"c\"}\n", "", "t.jsonl"));
}

PYTHON_TEST_CASE("tokenize.py: a prompt with its completion is read as in TRL") {
    const ChatFolder folder;
    folder.check(
        R"({"prompt": [{"role": "user", "content": "h"}, {"role": "assistant", "content": "i"}, )"
        R"({"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "c"}]})"
        "\n" +
            HELD,
        "--seq 60", "<|user|>h<|end|>\n<|assistant|>i<|end|>\n<|user|>a<|end|>\n<|assistant|>[c<|end|>]\n");
    // Texts: no chat template; a token begins the text, and one ends it.
    const std::string texts = R"({"prompt": "The sky", "completion": " is blue"})"
                              "\n"
                              R"({"prompt": "[1]", "completion": "[2]<|end|>"})"
                              "\n";
    folder.check(texts, "--seq 60", "<|assistant|>The sky[ is blue<|end|>]");
    CHECK(folder.windows("val") == "<|assistant|>[1][[2]<|end|>]\n");
    const Ended ended =
        folder.check(R"({"prompt": "<|user|>", "completion": "b"})"
                     "\n" +
                         texts,
                     "--seq 60", "<|assistant|><|user|>[b<|end|>]<|assistant|>The sky[ is blue<|end|>]");
    CHECK(contains(ended.out, "spells control tokens"));
}

PYTHON_TEST_CASE("tokenize.py: keys that are null are as if they were not there") {
    const ChatFolder folder;
    folder.write("model/template",
                 "json.dumps(tools) + ''.join(json.dumps(m) + '<|end|>' for m in messages)");
    const std::string record =
        R"({"tools": [{"name": "f", "to": null, "parameters": {"city": {"type": "string"}, "zone": null}}], )"
        R"("messages": [{"role": "user", "content": "q", "tool_calls": null}, {"role": "assistant", )"
        R"("content": "a", "tool_calls": [{"id": null, "function": {"name": "f", "arguments": )"
        R"({"city": "x", "zone": null, "list": [1, null, {"in": null}]}}}]}]})";
    const std::string expected =
        R"([{"name": "f", "parameters": {"city": {"type": "string"}}}]{"role": "user", "content": "q"}<|end|>)"
        R"([{"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": )"
        R"({"city": "x", "list": [1, null, {}]}}}]}<|end|>])";
    folder.check(record + "\n" + HELD, "--seq 400", expected);
    // Rows of parquet; the package is one of the test.
    folder.write("pyarrow/__init__.py", "class ArrowException(Exception): pass\n");
    folder.write("pyarrow/parquet.py", R"py(
import json
class Batch(list):
    def to_pylist(self): return self
class ParquetFile:
    def __init__(self, file): self.rows = [json.loads(line) for line in open(file)]
    def iter_batches(self, size): yield Batch(self.rows)
)py");
    folder.check(record + "\n" + HELD, "--seq 400", expected, "c.parquet");
}

PYTHON_TEST_CASE("tokenize.py: it finds the files that ./train finds; models are no data for both") {
    const ChatFolder folder;
    folder.write("in/a", std::string(500, 'a'));
    folder.write("in/sub/b", std::string(500, 'b'));
    folder.write("in/sub/.hidden", "hidden");
    folder.write("in/sub/c.gz", "compressed");
    fs::create_directory_symlink("sub", folder.path / "in/link");
    const std::map<std::string, std::string> models = {{"in/out/step-000001", "model.safetensors"},
                                                       {"in/sharded", "model.safetensors.index.json"},
                                                       {"in/without-index", "model-00001-of-2.safetensors"}};
    for (const auto& [model, weights] : models) {
        folder.write(model + "/" + weights, "weights");
        folder.write(model + "/config.json", "{}");
    }
    const auto left_out = [](const Ended& ended) {
        require_success(ended);
        std::set<std::string> lines;
        for (const std::string& line : lines_of(ended.out))
            if (line.starts_with("left out: ")) lines.insert(line);
        return lines;
    };
    const auto by_train = left_out(train(folder, "--device cpu --plan --data in"));
    for (const auto& [model, weights] : models)
        CHECK(by_train.count("left out: " + model + " is a model or a checkpoint") == 1);
    CHECK(by_train.size() == 5);
    CHECK(left_out(folder.run("--tokenizer model --out tokens in")) == by_train);
}

PYTHON_TEST_CASE("tokenize.py: what is left out is named with its reason") {
    const ChatFolder folder;
    folder.write("in/a", "text a\n");
    folder.write("in/b", std::string("nul\0byte\n", 9));
    folder.write("in/c", std::string("\xFF\xFEu\0t\0", 6));
    folder.write("in/d", "latin \xE9\n");
    folder.write("in/e.jsonl.gz", "\x1F\x8B");
    folder.write("in/\xFF.txt", "\xFF");
    folder.write("elsewhere/x", "linked\n");
    folder.write("in/step-000001/model.safetensors", "");
    fs::create_directory_symlink(folder / "elsewhere", folder / "in/link");
    fs::create_symlink(folder / "nowhere", folder / "in/dangling");
    fs::create_symlink(folder / "elsewhere/x", folder / "in/file");  // is read
    require_success(shell(folder, "mkfifo in/fifo"));
    folder.write("in/z", "text z\n");
    const Ended ended = folder.run("--tokenizer model --out tokens in --hold-out 0.001");
    require_success(ended);
    for (const char* line : {"in/b has a NUL byte", "in/c is UTF-16; convert it to UTF-8",
                             "in/d is not UTF-8 from byte 6", "in/e.jsonl.gz is compressed; unpack it",
                             "in/\\udcff.txt is not UTF-8", "in/link is a link to a folder",
                             "in/step-000001 is a model", "in/dangling is no file", "in/fifo is no file"})
        CHECK_MESSAGE(contains(ended.out, std::string("left out: ") + line), line);
    const Corpus corpus = load_corpus(folder / "tokens");
    CHECK(contains(corpus.vocabulary.decode(tokens_of(corpus.train)), "linked"));
    // Of more than ten files the others are counted; copies are counted.
    for (int i = 0; i < 30; i++) folder.write(concat("in/many/", i), concat("\xFF", i));
    for (int i = 0; i < 5; i++) folder.write(concat("in/copies/", i), "text a\n");
    const Ended more = folder.run("--tokenizer model --out tokens in --hold-out 0.001");
    require_success(more);
    CHECK(contains(more.out, "left out: 29 more files\n"));
    CHECK(contains(more.out, "left out: 5 copies of texts"));
    const Ended copies = folder.tokenize(chat({"a", "b"}) + chat({"a", "b"}) + chat({"a", "b"}) + HELD);
    CHECK(contains(copies.out, "left out: 2 copies of texts or conversations"));
    // With nothing left it is an error, after the reasons. A file of records says what to do.
    const Ended none = folder.run("--tokenizer model --out tokens in/b");
    check_failed(none, "there is no text");
    CHECK(contains(none.out, "in/b has a NUL byte"));
    check_failed(folder.run("--tokenizer model --out tokens in/e.jsonl.gz"), "in/e.jsonl.gz", "unpack it");
    folder.write("mixed/a.txt", "text");
    folder.write("mixed/c.jsonl", HELD);
    check_failed(folder.run("--tokenizer model --out tokens --seq 32 mixed"), "mixed/c.jsonl", "mixed/a.txt");
    folder.write("other/log.jsonl", "{\"loss\": 1}\n");
    check_failed(folder.run("--tokenizer model --out tokens other"), "other/log.jsonl", "leave the file out");
}

PYTHON_TEST_CASE("tokenize.py: a long text is tokenized in parts and stays the same text") {
    const ChatFolder folder;
    std::string words, lines, letters;  // without line ends; with blank lines and indentation; without spaces
    while (words.size() < 3 << 19) words += "word and ";
    while (lines.size() < 3 << 19) lines += "line\n\n    of code \n";
    while (letters.size() < 3 << 19) letters += "letters";
    folder.write("in/a", words);
    folder.write("in/b", lines);
    folder.write("in/c", letters);
    for (const char* as : {"", "FIRST_SPACE"}) {
        folder.write("model/template", as);
        require_success(folder.run("--tokenizer model --out tokens in --hold-out 0.001"));
        const Corpus corpus = load_corpus(folder / "tokens");
        const std::string space = *as ? " " : "";
        std::string expected, rest;
        for (const std::string& text : {words, lines, letters}) {
            const size_t kept = size_t(double(text.size()) * (1 - 0.001));
            expected += "<|end|>" + space + text.substr(0, kept);
            rest += "<|end|>" + space + text.substr(kept);
        }
        CHECK((corpus.vocabulary.decode(tokens_of(corpus.train)) == expected));
        CHECK(corpus.vocabulary.decode(tokens_of(corpus.validation)) == rest);
    }
    // A conversation that is as long is cut before the tokenizer has it.
    folder.write("model/template", CHAT);
    folder.check(chat({"q", words}) + HELD, "--seq 24",
                 "<|user|>q<|end|>\n<|assistant|>[word and word and w]");
}

PYTHON_TEST_CASE("tokenize.py: the tokenizer's files stand beside the token files") {
    const ChatFolder folder;
    folder.write("text", "some text");
    for (const char* name : {"tokenizer.json", "tekken.json", "tokenizer_config.json"})
        folder.write(concat("model/", name), name);
    folder.write("model/config.json", "of the model");
    folder.write("tokens/vocab.json", "of an earlier tokenizer");
    require_success(folder.run("--tokenizer model --out tokens text --hold-out 0.5"));
    std::map<std::string, std::string> found = files_below(folder / "tokens");
    CHECK(found.at("tekken.json") == "tekken.json");
    CHECK(found.size() == 6);  // train.bin val.bin tokenizer.bin
    CHECK(!found.count("vocab.json"));
    // A tokenizer that is opened from the folder to which the tokens go stays.
    for (const char* name : {"special", "template"})
        fs::copy(folder / (std::string("model/") + name), folder / (std::string("tokens/") + name));
    require_success(folder.run("--tokenizer tokens --out tokens text --hold-out 0.5"));
    CHECK(read_file(folder / "tokens/tekken.json") == "tekken.json");
}

PYTHON_TEST_CASE("tokenize.py: a conversation lies within one window and windows are filled up") {
    const ChatFolder folder;
    folder.write("model/template", "''.join(m['content'] for m in messages) + '<|end|>'*(len(messages)>1)");
    // 6, 8, 4 and 8 tokens; one that fills a window to the last token; one of --seq tokens, which is not cut.
    std::string lines;
    for (const char* letters : {"aaaa", "bbbbbb", "cc", "dddddd", "gg", "hhhhhhhhhh"})
        lines += chat({letters, "x"});
    const Ended ended = folder.check(lines + chat({"e", "whole"}) + HELD, "--seq 12 --hold-out 0.05",
                                     "aaaa[x<|end|>]cc[x<|end|>]\nbbbbbb[x<|end|>]gg[x<|end|>]\n"
                                     "dddddd[x<|end|>]\nhhhhhhhhhh[x<|end|>]\ne[whole<|end|>]");
    CHECK(contains(ended.out, "; 0 are cut"));
    CHECK(load_corpus(folder / "tokens").seq == 12);
    folder.check(lines + HELD, "--seq 12 --hold-out 0.05 --one-per-window",
                 "aaaa[x<|end|>]\nbbbbbb[x<|end|>]\ncc[x<|end|>]\ndddddd[x<|end|>]\ngg[x<|end|>]\n"
                 "hhhhhhhhhh[x<|end|>]");
    // One that stands there before, longer ones, and those without an answer.
    const Ended counted = folder.check(chat({"abc", "x"}) + chat({"abc", "x"}) + chat({"123456789012", "x"}) +
                                           chat({"123", "yyyyyyyyy"}) + chat({"z", " "}) + "\n" +
                                           chat({"q"}) + chat({"b", "x"}),
                                       "--seq 12", "abc[x<|end|>]\n123[yyyyyyyyy]");
    CHECK((contains(counted.out, "3 conversations have an empty answer") &&
           contains(counted.out, "; 1 are cut")));
    CHECK(folder.windows("val") == "b[x<|end|>]\n");
}

PYTHON_TEST_CASE(
    "tokenize.py: plain text keeps its bytes and each text begins with the end of the one before") {
    const ChatFolder folder;
    const std::string line = "eight b\n", small = "line\r\nends\rstay\n";
    std::string large;  // of several parts
    while (large.size() < 3 << 19) large += line;
    folder.write("model/special", "<|user|>\n<|assistant|>\n<|end|>\n<|\u00e9|>");  // plain text, not bytes
    folder.write("in/a", large), folder.write("in/b", "\xEF\xBB\xBF" + small), folder.write("in/copy", small);
    folder.write("in/out/model.safetensors", "");
    folder.write("in/out/config.json", "a model's");
    folder.write("in/binary", "\xFF\xFE");
    folder.write("in/.hidden", "hidden");
    folder.write("in/empty", "");
    for (int i = 0; i < 8; i++) folder.write(concat("in/sub/", i), concat("text ", i));
    for (const char* spelled : {"", "BYTE_LEVEL"}) {
        folder.write("model/template", spelled);
        require_success(folder.run("--tokenizer model --out tokens in"));
        const Corpus corpus = load_corpus(folder / "tokens");
        std::string expected = "<|end|>" + large + "<|end|>" + small;
        for (int i = 0; i < 8; i++)
            if (i != 3) expected += concat("<|end|>text ", i);
        CHECK((corpus.vocabulary.decode(tokens_of(corpus.train)) == expected));
        CHECK(corpus.vocabulary.decode(tokens_of(corpus.validation)) == "<|end|>text 3");
        CHECK((corpus.seq == 0 && corpus.vocabulary.size() == 260 &&
               corpus.vocabulary.pieces[259] == "<|\u00e9|>"));
        CHECK(corpus.vocabulary.end_token == 258);
    }
    require_success(folder.run("--tokenizer model --out tokens in/a --hold-out 0.25"));  // 2-byte tokens
    CHECK(fs::file_size(folder / "tokens/val.bin") == 1024 + 2 * (1 + large.size() / 4));
    // Of few texts the end of each is held out.
    require_success(folder.run("--tokenizer model --out tokens in/b in/sub/0 --hold-out 0.25"));
    const Corpus corpus = load_corpus(folder / "tokens");
    CHECK(corpus.vocabulary.decode(tokens_of(corpus.validation)) == "<|end|>tay\n<|end|> 0");
}

PYTHON_TEST_CASE("tokenize.py: what cannot be used is rejected in one sentence and earlier data stay") {
    const ChatFolder folder;
    const std::string good = chat({"abc", "x"}) + chat({"def", "y"}), seq = "--seq 32";
    require_success(folder.tokenize(good));
    const auto before = folder.files();
    const std::string rows[][4] = {
        // records, flags, and what the error names
        {good, "", "c.jsonl", "--seq"},
        {chat({"abc", "x"}), seq, "two conversations", ""},
        {chat({"abc", ""}) + chat({"def", ""}), seq, "two conversations", ""},
        {good + "{\"messages\"\n", seq, "c.jsonl:3", "JSON"},
        {good + std::string(100000, '[') + "\n", seq, "c.jsonl:3", "JSON"},
        {good + "[1]\n", seq, "c.jsonl:3", "no object"},
        {good + "{\"text\": \"abc\"}\n", seq, "c.jsonl:3", "a text among conversations"},
        {"{\"text\": \"abc\"}\n" + good, "", "c.jsonl:2", "a conversation among texts"},
        {good + "{\"question\": \"abc\", \"id\": 1}\n", seq, "c.jsonl:3", "question, id"},
        {good + "{\"messages\": [1]}\n", seq, "c.jsonl:3", "role"},
        {good + chat({"q", "\\ud800"}), seq, "c.jsonl:3", "where text belongs"},
        {good + chat({"q", "a"}, ", \"weight\": \"0\""), seq, "c.jsonl:3", "weight"},
        {good + R"({"conversations": [{"from": [], "value": 1}]})", seq, "c.jsonl:3", "from"},
        {good + "{\"messages\": [{\"role\": \"user\"}]}\n", seq, "c.jsonl:3", "template fails"},
        {good + R"({"instruction": "a", "output": "b", "history": ["c"]})", seq, "c.jsonl:3", "history"},
        {good + R"({"messages": [{"role": "user", "content": "a"}], "tools": 5})", seq, "c.jsonl:3",
         "tools"}};
    for (const auto& [records, flags, who, what] : rows) {
        CAPTURE(records);
        const Ended ended = folder.tokenize(records, flags);
        check_failed(ended, who, what);
        CHECK(!contains(ended.error, "Traceback"));
    }
    folder.write("text", "ab\n");
    check_failed(folder.run("--tokenizer model --seq 32 c.jsonl text"), "c.jsonl", "alone");
    for (const char* flags : {"text --tokenizer model --seq 8", "text --tokenizer model --one-per-window"})
        check_failed(folder.run(flags), "--seq", "for conversations");
    for (const char* flags :
         {"text", "text --tokenizer model --hold-out 1", "text --tokenizer model --hold-out 0.6",
          "text --train-bpe 256", "text --tokenizer model --train-bpe 300"})
        check_failed(folder.run(flags), "--tokenizer", "--hold-out");
    check_failed(folder.run("--tokenizer model nowhere"), "nowhere");
    check_failed(tokenize_py(folder, "--tokenizer model --out tokens text", "ulimit -f 1; "), "too large");
    folder.write("transformers/__init__.py", "raise ImportError()");
    check_failed(folder.tokenize(good), "pip install transformers");
    for (const char* name : {"tokens/train.bin", "tokens/val.bin", "tokens/tokenizer.bin"})
        CHECK(read_file(folder / name) == before.at(name));
}

TEST_CASE("tokenize.py with transformers itself: a BPE is trained and the assistant's tokens count" *
          doctest::skip(NO_TRANSFORMERS)) {
    Folder folder;
    const std::string text = "d\u00e9j\u00e0 vu, <|im_end|> d\u00e9j\u00e0 vu\r\n";
    std::string many;
    for (int i = 0; i < 40; i++) many += text;
    folder.write("text", many);
    require_success(tokenize_py(folder, "--train-bpe 270 --out model text"));
    const Corpus plain = load_corpus(folder / "model");
    CHECK(plain.train.size() < int64_t(many.size()) * 8 / 10);
    std::string expected = "<|endoftext|>";  // and the first nine tenths
    for (int i = 0; i < 36; i++) expected += text;
    CHECK(plain.vocabulary.decode(tokens_of(plain.train)) == expected);
    folder.write("template.py", R"(
import transformers
tokenizer = transformers.AutoTokenizer.from_pretrained("model")
tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
tokenizer.chat_template = """{{- strftime_now("%d.%m.%Y") + "|" + date_string }}
{%- for message in messages %}
    {%- if message.role == "tool" %}{{ raise_exception("unknown role " + message.role) }}{% endif %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- if message.role == "assistant" %}
        {%- generation %}{{- message.content + eos_token + "\n" }}{% endgeneration %}
    {%- else %}
        {{- message.content + eos_token + "\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}"""
tokenizer.save_pretrained("chat")
)");
    require_success(shell(folder, "python3 template.py"));
    require_success(tokenize_py(folder, "--tokenizer chat --out again text"));  // "special" tokens are text
    const Tokens again = tokens_of(load_corpus(folder / "again").train);
    CHECK(std::count(again.begin(), again.end(), again[0]) == 1);
    const std::string conversation = chat({"h\\u00e9", " \\u00fc b"});
    folder.write("c.jsonl", conversation + HELD);
    const std::string chats = "--tokenizer chat --out tokens --seq 120 c.jsonl";
    Tokens tokens, targets;  // of the first conversation, without padding
    const auto tokenize = [&](const std::string& records) {
        folder.write("c.jsonl", records);
        require_success(tokenize_py(folder, chats));
        const Corpus corpus = load_corpus(folder / "tokens");
        tokens.resize(corpus.train.size());
        targets.resize(corpus.train.size());
        corpus.train.read(0, corpus.train.size(), tokens.data(), targets.data());
        while (tokens.back() == corpus.vocabulary.end_token) tokens.pop_back();
        targets.resize(tokens.size());
        Tokens counted;
        std::copy_if(targets.begin(), targets.end(), std::back_inserter(counted),
                     [](auto t) { return t >= 0; });
        return std::pair{corpus.vocabulary.decode(tokens), corpus.vocabulary.decode(counted)};
    };
    // What the template marks counts, here with the line end. The date is the same every day.
    const auto [all, counted] = tokenize(conversation + HELD);
    CHECK(all ==
          "26.07.2024|26 Jul 2024<|im_start|>user\nh\u00e9<|im_end|>\n"
          "<|im_start|>assistant\n \u00fc b<|im_end|>\n");
    CHECK(counted == " \u00fc b<|im_end|>\n");
    const int32_t end = load_corpus(folder / "tokens").vocabulary.end_token;
    CHECK(std::count(tokens.begin(), tokens.end(), end) == 2);
    // A control token that a message spells is text; an answer of weight 0 does not count.
    const std::string spelled = chat({"<|im_end|>", "no", "q", "A <|im_end|>B"}, R"(, "weight": 0)");
    const auto [shown, last] = tokenize(spelled + HELD);
    CHECK(contains(shown, "user\n<|im_end|><|im_end|>\n"));
    CHECK(last == "A <|im_end|>B<|im_end|>\n");
    CHECK(std::count(tokens.begin(), tokens.end(), end) == 4);
    folder.write("c.jsonl", conversation + R"({"messages": [{"role": "tool", "content": "x"}, )"
                                           R"({"role": "assistant", "content": "y"}]})");
    check_failed(tokenize_py(folder, chats), "c.jsonl:2", "unknown role tool");
}
