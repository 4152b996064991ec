// conversations.h - a model's folder and conversations, for the tests of data/tokenize.py and of training on
// conversations. The package transformers is replaced by a small one, whose tokens are bytes.
#pragma once
#include <cstring>

#include "program.h"
#include "tokens.h"

namespace coat::test {

inline const bool NO_PYTHON = std::system("python3 --version >/dev/null 2>&1") != 0;
inline const bool NO_TRANSFORMERS = std::system("python3 -c 'import transformers' >/dev/null 2>&1") != 0;

// Token t below 256 is a byte, spelled as in SentencePiece or, with BYTE_LEVEL, as in GPT-2. model/special
// lists the special tokens that follow, and model/template is the chat template as an expression of Python.
inline const char* const TRANSFORMERS = R"py(
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
        ids, offsets, at = [257] if add_special_tokens else [], [], 0
        for part in re.split("(<[|].*?[|]>)", text):
            if part in self.special and not split_special_tokens:
                ids.append(256 + self.special.index(part)), offsets.append((at, at + len(part)))
            else:
                for i, c in enumerate(part):
                    ids += c.encode()
                    offsets += [(at + i, at + i + 1)] * len(c.encode())
            at += len(part)
        return {"input_ids": ids, "offset_mapping": offsets}
)py";
inline const std::string CHAT =
    "''.join('<|' + m['role'] + '|>' + m['content'] + '<|end|>\\n' for m in messages)"
    " + ('<|assistant|>' if add_generation_prompt else '')";

// A folder with a model's tokenizer and the package; records go into c.jsonl, or into `file`.
struct ChatFolder : Folder {
    ChatFolder() {
        write("transformers.py", TRANSFORMERS);
        write("model/special", "<|user|>\n<|assistant|>\n<|end|>");
        write("model/template", CHAT);
    }
    Ended run(const std::string& flags) const {
        return shell(*this,
                     "PYTHONPATH=. python3 '" + fs::absolute("data/tokenize.py").string() + "' " + flags);
    }
    Ended tokenize(const std::string& records, const std::string& flags = "--seq 32",
                   const std::string& file = "c.jsonl") const {
        write(file, records);
        return run("--tokenizer model --out tokens " + file + " " + flags);
    }
    // The text of a token file, with what counts in square brackets; each line is a window without its
    // padding.
    std::string windows(const std::string& name = "train") const {
        const Corpus corpus = load_corpus(*this / "tokens");
        const TokenStream& stream = name == "train" ? corpus.train : corpus.validation;
        std::vector<int32_t> tokens(stream.size()), targets(stream.size());
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

inline std::string chat(const std::string& question, const std::string& answer) {
    return R"({"messages": [{"role": "user", "content": ")" + question +
           R"("}, {"role": "assistant", "content": ")" + answer + "\"}]}\n";
}

// The digits are random, with an entropy of 2.3 nats each; the answer is always the same.
inline std::string same_answers() {
    std::string lines;
    for (int i = 0; i < 400; i++) lines += chat(std::to_string(i * 7919 % 10000), "yes");
    return lines;
}

}  // namespace coat::test
