// tokenize.cpp - data/tokenize.py: which tokens of conversations count, and how it packs and divides. The
// last test has transformers itself; the others have a small one of the tests.
#include "../help/program.h"

using namespace coat;
using namespace coat::test;

namespace {

const bool NO_PYTHON = std::system("python3 --version >/dev/null 2>&1") != 0;
#define PYTHON_TEST_CASE(name) TEST_CASE("tokenize.py: " name* doctest::skip(NO_PYTHON))
const bool NO_TRANSFORMERS = std::system("python3 -c 'import transformers' >/dev/null 2>&1") != 0;

// Token t below 256 is a byte, spelled as in SentencePiece or, with BYTE_LEVEL, as in GPT-2. model/special
// lists the special tokens that follow, and model/template is the chat template as an expression of Python.
const char* const TRANSFORMERS = R"py(
import collections, re
Added = collections.namedtuple("Added", "content")
OWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in OWN]
class AutoTokenizer:
    @staticmethod
    def from_pretrained(name):
        self = AutoTokenizer()
        self.special = open(name + "/special").read().split("\n")
        self.template = open(name + "/template").read()
        self.eos_token_id = 258
        self.added_tokens_decoder = {256 + i: Added(s) for i, s in enumerate(self.special)}
        return self
    def get_vocab(self):
        byte_level = "BYTE_LEVEL" in self.template
        own = lambda t: chr(t) if t in OWN else chr(256 + OTHERS.index(t))
        spelled = {own(t) if byte_level else "<0x%02X>" % t: t for t in range(256)}
        return {**spelled, **{s: 256 + i for i, s in enumerate(self.special)}}
    def apply_chat_template(self, messages, tools, tokenize, add_generation_prompt, date_string):
        assert tokenize is False and date_string
        seen = dict(messages=messages, add_generation_prompt=add_generation_prompt)
        return eval(self.template, seen)
    def __call__(self, text, add_special_tokens, verbose, return_offsets_mapping=False,
                 split_special_tokens=False):
        if isinstance(text, list):
            found = [self(t, add_special_tokens, verbose, False, split_special_tokens) for t in text]
            return {"input_ids": [f["input_ids"] for f in found]}
        ids, offsets, at = [257] if add_special_tokens else [], [], 0
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

Ended tokenize_py(const Folder& folder, const std::string& flags, const std::string& limit = "") {
    const std::string script = " PYTHONPATH=. python3 '" + fs::absolute("data/tokenize.py").string() + "' ";
    return shell(folder, limit + "TRANSFORMERS_VERBOSITY=error" + script + flags);
}

// A folder with a model's tokenizer and the package; records go into c.jsonl, or into `file`.
struct ChatFolder : Folder {
    ChatFolder() {
        write("transformers.py", TRANSFORMERS);
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
            text += corpus.decode({tokens[i]});
            inside = counts;
            if ((i + 1) % corpus.seq) continue;
            if (inside) text += "]";
            while (ends_with(text, "<|end|>")) text.resize(text.size() - strlen("<|end|>"));
            text += "\n", inside = false;
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

// A conversation in which user and assistant take turns. `more`: fields of the first answer.
std::string chat(const std::vector<std::string>& said, const std::string& more = "") {
    std::string all;
    for (size_t i = 0; i < said.size(); i++)
        all += concat(i ? "," : "", R"({"role": ")", i % 2 ? "assistant" : "user", R"(", "content": ")",
                      said[i], "\"", i == 1 ? more : "", "}");
    return "{\"messages\": [" + all + "]}\n";
}
const std::string HELD = chat({"held", "out"});

}  // namespace

PYTHON_TEST_CASE("what the assistant says counts with the end of its turn") {
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
    folder.check(chat({"", "abc"}) + HELD, "--seq 4", "a[bc]");
    folder.write("model/template", "'a<|us' + (messages[1]['content'] if messages[1:] else '')");
    folder.check(chat({"x", "er|>b<|end|>"}) + HELD, "--seq 9", "a[<|user|>b<|end|>]");
}

PYTHON_TEST_CASE("an answer is found where a template treats it in a way of its own") {
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
    // What follows an answer differs between the middle and the end.
    folder.write("model/template",
                 "''.join(m['content'] + ('<|end|>' if m is messages[-1] else '/') for m in messages)");
    check_failed(folder.tokenize(two), "c.jsonl:1", "'/r/B<|end|>' after answer 2, but '<|end|>'");
}

PYTHON_TEST_CASE("records of every known form and texts among them") {
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

PYTHON_TEST_CASE("a conversation lies within one window and windows are filled up") {
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
    // One that stands there before, longer ones, and those without an answer.
    const Ended counted = folder.check(chat({"abc", "x"}) + chat({"abc", "x"}) + chat({"123456789012", "x"}) +
                                           chat({"123", "yyyyyyyyy"}) + chat({"z", " "}) + "\n" +
                                           chat({"q"}) + chat({"b", "x"}),
                                       "--seq 12", "abc[x<|end|>]\n123[yyyyyyyyy]");
    CHECK((contains(counted.out, "3 conversations have no answer") && contains(counted.out, "; 1 are cut")));
    CHECK(folder.windows("val") == "b[x<|end|>]\n");
}

PYTHON_TEST_CASE("plain text keeps its bytes and each text begins with the end of the one before") {
    const ChatFolder folder;
    const std::string line = "eight b\n", small = "line\r\nends\rstay\n";
    std::string large;  // of several parts
    while (large.size() < 3 << 19) large += line;
    folder.write("model/special", "<|user|>\n<|assistant|>\n<|end|>\n<|\u00e9|>");  // plain text, not bytes
    folder.write("in/a", large), folder.write("in/b", "\xEF\xBB\xBF" + small), folder.write("in/copy", small);
    folder.write("in/out/model.safetensors", ""), folder.write("in/out/config.json", "a model's");
    folder.write("in/binary", "\xFF\xFE"), folder.write("in/.hidden", "hidden"), folder.write("in/empty", "");
    for (int i = 0; i < 8; i++) folder.write(concat("in/sub/", i), concat("text ", i));
    for (const char* spelled : {"", "BYTE_LEVEL"}) {
        folder.write("model/template", spelled);
        require_success(folder.run("--tokenizer model --out tokens in"));
        const Corpus corpus = load_corpus(folder / "tokens");
        std::string expected = "<|end|>" + large + "<|end|>" + small;
        for (int i = 0; i < 8; i++)
            if (i != 3) expected += concat("<|end|>text ", i);
        CHECK((corpus.decode(tokens_of(corpus.train)) == expected));
        CHECK(corpus.decode(tokens_of(corpus.validation)) == "<|end|>text 3");
        CHECK((corpus.seq == 0 && corpus.vocabulary.size() == 260 && corpus.vocabulary[259] == "<|\u00e9|>"));
        CHECK(corpus.end_token == 258);
    }
    require_success(folder.run("--tokenizer model --out tokens in/a --hold-out 0.25"));  // 2-byte tokens
    CHECK(fs::file_size(folder / "tokens/val.bin") == 1024 + 2 * (1 + large.size() / 4));
    // Of few texts the end of each is held out.
    require_success(folder.run("--tokenizer model --out tokens in/b in/sub/0 --hold-out 0.25"));
    const Corpus corpus = load_corpus(folder / "tokens");
    CHECK(corpus.decode(tokens_of(corpus.validation)) == "<|end|>tay\n<|end|> 0");
}

PYTHON_TEST_CASE("what cannot be used is rejected in one sentence and earlier data stay") {
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
        {good + "{\"messages\": [{\"role\": \"user\"}]}\n", seq, "c.jsonl:3", "template fails"}};
    for (const auto& [records, flags, who, what] : rows) {
        CAPTURE(records);
        const Ended ended = folder.tokenize(records, flags);
        check_failed(ended, who, what);
        CHECK(!contains(ended.error, "Traceback"));
    }
    folder.write("text", "ab\n");
    check_failed(folder.run("--tokenizer model --seq 32 c.jsonl text"), "c.jsonl", "alone");
    for (const char* flags : {"text", "text --tokenizer model --seq 8", "text --tokenizer model --hold-out 1",
                              "text --tokenizer model --hold-out 0.6", "text --train-bpe 256",
                              "text --tokenizer model --train-bpe 300"})
        check_failed(folder.run(flags), "--tokenizer", "--hold-out");
    check_failed(folder.run("--tokenizer model nowhere"), "nowhere");
    check_failed(tokenize_py(folder, "--tokenizer model --out tokens text", "ulimit -f 1; "), "too large");
    folder.write("transformers.py", "raise ImportError()");
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
    CHECK(plain.decode(tokens_of(plain.train)) == expected);
    folder.write("template.py", R"(
import transformers
tokenizer = transformers.AutoTokenizer.from_pretrained("model")
tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
tokenizer.chat_template = """{%- for message in messages %}
    {%- if message.role == "tool" %}{{ raise_exception("unknown role " + message.role) }}{% endif %}
    {{- "<|im_start|>" + message.role + "\n" }}
    {%- generation %}{{ message.content + eos_token }}{% endgeneration %}
    {{- "\n" }}
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
    const std::string chats = "--tokenizer chat --out tokens --seq 40 c.jsonl";
    require_success(tokenize_py(folder, chats));
    const Corpus corpus = load_corpus(folder / "tokens");
    Tokens tokens(corpus.train.size()), targets(tokens.size()), counted;
    corpus.train.read(0, corpus.train.size(), tokens.data(), targets.data());
    std::copy_if(targets.begin(), targets.end(), std::back_inserter(counted), [](auto t) { return t >= 0; });
    CHECK(corpus.decode(counted) == " \xC3\xBC b<|im_end|>");
    folder.write("c.jsonl", conversation + R"({"messages": [{"role": "tool", "content": "x"}, )"
                                           R"({"role": "assistant", "content": "y"}]})");
    check_failed(tokenize_py(folder, chats), "c.jsonl:2", "unknown role tool");
}
