// conversations.h - a model's folder and conversations, for the tests of data/tokenize.py and of training on
// conversations. The Python packages are replaced by small ones, whose tokens are bytes.
#pragma once
#include "../model.h"
#include "help/program.h"
#include "token_files.h"

namespace coat::test::conversations {

using namespace token_files;

inline const bool NO_PYTHON = std::system("python3 --version >/dev/null 2>&1") != 0;
inline const bool NO_PACKAGES = std::system("python3 -c 'import tokenizers, jinja2' >/dev/null 2>&1") != 0;

// Token t below 256 is a byte. tokenizer.json lists the special tokens that follow.
inline const char* const TOKENIZERS = R"py(
import json, re
class Encoding:
    pass
class Special:
    def __init__(self, content): self.content, self.special = content, True
class Tokenizer:
    @staticmethod
    def from_file(name):
        self = Tokenizer()
        self.special = json.load(open(name))
        return self
    def to_str(self): return json.dumps({"decoder": {"type": "ByteFallback"}})
    def get_added_tokens_decoder(self): return {256 + i: Special(s) for i, s in enumerate(self.special)}
    def id_to_token(self, t): return "<0x%02X>" % t if t < 256 else self.special[t - 256]
    def token_to_id(self, name): return 256 + self.special.index(name) if name in self.special else None
    def get_vocab(self, with_added_tokens):
        return {self.id_to_token(t): t for t in range(256 + len(self.special))}
    def encode(self, text, add_special_tokens=True):
        result, at = Encoding(), 0
        result.ids, result.offsets = [], []
        for part in re.split("(<[|].*?[|]>)", text):
            if part in self.special:
                result.ids.append(self.token_to_id(part)), result.offsets.append((at, at + len(part)))
            else:
                for i, c in enumerate(part):
                    for byte in c.encode():
                        result.ids.append(byte), result.offsets.append((at + i, at + i + 1))
            at += len(part)
        return result
)py";
inline const char* const SANDBOX = R"(
from . import TemplateError
class Template:
    def __init__(self, text, names): self.text, self.names = text, names
    def render(self, **more): return eval(self.text, {**self.names, **more})
class ImmutableSandboxedEnvironment:
    def __init__(self, **options): self.globals, self.filters = {}, {}
    def from_string(self, text, names):
        if not text: raise TemplateError("no text")
        return Template(text, {**self.globals, **names})
)";
inline const std::string CHAT = R"(''.join('<|' + m['role'] + '|>' + m['content'] + '<|end|>\\n' )"
                                R"(for m in messages) + ('<|assistant|>' if add_generation_prompt else ''))";

inline std::string config_with(const std::string& chat) {
    return R"({"eos_token": {"content": "<|end|>"}, "chat_template": ")" + chat + "\"}";
}

// A folder with a model's tokenizer and the packages; conversations go into c.jsonl.
struct ChatFolder : Folder {
    ChatFolder() {
        write("tokenizers.py", TOKENIZERS);
        write("jinja2/__init__.py", "class TemplateError(Exception): pass");
        write("jinja2/sandbox.py", SANDBOX);
        write("model/tokenizer.json", R"(["<|user|>", "<|assistant|>", "<|end|>"])");
        write("model/tokenizer_config.json", config_with(CHAT));
    }
    Ended tokenize(const std::string& conversations, const std::string& flags = "--seq 32") const {
        write("c.jsonl", conversations);
        return run("--out tokens c.jsonl " + flags);
    }
    Ended run(const std::string& flags, const std::string& tokenizer = "--tokenizer model ") const {
        const std::string script = fs::absolute("data/tokenize.py").string();
        return shell(*this, "PYTHONPATH=. python3 '" + script + "' " + tokenizer + flags);
    }
    // The text of train.bin, with what counts in square brackets; each line is a window.
    std::string windows(int64_t T) const {
        const Vocabulary pieces = Vocabulary::read(*this / "tokens/vocabulary.json");
        const TokenStream stream = load_corpus(*this / "tokens").train;
        const std::vector<int32_t> tokens = token_files::tokens_of(stream);
        std::string text;
        bool inside = false;
        for (int64_t i = 0; i + 1 < stream.size(); i++) {
            int32_t token = tokens[i], target = token;
            stream.mask(i, 1, &target);
            if (inside != (target != NO_TARGET)) text += inside ? "]" : "[";
            inside = target != NO_TARGET;
            if (i && i % T == 0) text += "\n";
            text += pieces.decode({token});
        }
        return inside ? text + "]" : text;
    }
};

inline std::string completion(const std::string& prompt, const std::string& answer) {
    return R"({"prompt": ")" + prompt + R"(", "completion": ")" + answer + "\"}\n";
}

// The digits are random, with an entropy of 2.3 nats each; the answer is always the same.
inline std::string same_answers() {
    std::string lines;
    for (int i = 0; i < 400; i++) lines += completion(std::to_string(i * 7919 % 10000), "yes");
    return lines;
}

// Padded with the end of the text to `length` tokens.
inline std::string padded(std::string text, size_t tokens, size_t length) {
    for (; tokens < length; tokens++) text += "<|end|>";
    return text;
}

}  // namespace coat::test::conversations
