// test_conversations.cpp - instruction data from end to end: data/tokenize.py packs conversations and writes
// masks, and ./train trains on what counts. The Python packages are replaced by small ones of the test, whose
// tokens are bytes; the last test has the real ones.
#include <doctest/doctest.h>

#include <cmath>

#include "program.h"
#include "several_ranks.h"
#include "token_files.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::token_files;

namespace {

const bool NO_PYTHON = std::system("python3 --version >/dev/null 2>&1") != 0;
const bool NO_PACKAGES = std::system("python3 -c 'import tokenizers, jinja2' >/dev/null 2>&1") != 0;

// Token t below 256 is a byte. tokenizer.json lists the special tokens that follow.
const char* const TOKENIZERS = R"py(
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
const char* const SANDBOX = R"(
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
const std::string CHAT = R"(''.join('<|' + m['role'] + '|>' + m['content'] + '<|end|>\\n' )"
                         R"(for m in messages) + ('<|assistant|>' if add_generation_prompt else ''))";

std::string config_with(const std::string& chat) {
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
        std::string text;
        bool inside = false;
        for (int64_t i = 0; i + 1 < stream.size(); i++) {
            int32_t token = stream[i], target = token;
            stream.mask(i, 1, &target);
            if (inside != (target != NO_TARGET)) text += inside ? "]" : "[";
            inside = target != NO_TARGET;
            if (i && i % T == 0) text += "\n";
            text += pieces.decode({token});
        }
        return inside ? text + "]" : text;
    }
};

std::string completion(const std::string& prompt, const std::string& answer) {
    return R"({"prompt": ")" + prompt + R"(", "completion": ")" + answer + "\"}\n";
}

// The digits are random, with an entropy of 2.3 nats each; the answer is always the same.
std::string same_answers() {
    std::string lines;
    for (int i = 0; i < 400; i++) lines += completion(std::to_string(i * 7919 % 10000), "yes");
    return lines;
}

// Padded with the end of the text to `length` tokens.
std::string padded(std::string text, size_t tokens, size_t length) {
    for (; tokens < length; tokens++) text += "<|end|>";
    return text;
}

}  // namespace

TEST_CASE("tokenize.py: what the assistant says counts, with the end of its turn" *
          doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    const std::string chat = R"({"messages": [{"role": "user", "content": "hi"},)"
                             R"({"role": "assistant", "content": "A\u00e9"},)"
                             R"({"role": "user", "content": "b"},)"
                             R"({"role": "assistant", "content": "C"}]})";
    const Ended ended = folder.tokenize(chat + "\n" + completion("held", "out"));
    require_success(ended);
    CHECK(folder.windows(32) == padded("<|user|>hi<|end|>\n<|assistant|>[A\xC3\xA9<|end|>]\n"
                                       "<|user|>b<|end|>\n<|assistant|>[C<|end|>]\n", 19, 32));
    CHECK(contains(ended.out, "train.bin: 1 conversations in 1 windows of 32 tokens"));
    // A token that begins in the prompt and ends in the answer counts. White space after <|end|> does not.
    const std::string lines =
        completion("a<|us", "er|>b ") + completion("held", "out") + completion("c", "d<|end|> ");
    require_success(folder.tokenize(lines, "--seq 5 --hold-out 0.34"));
    CHECK(folder.windows(5) == "a[<|user|>b <|end|>]\nc[d<|end|>] [<|end|>]");
    // A data set with rows of both kinds has null where a row lacks a field.
    const std::string null = R"({"messages": null, "prompt": "a", "completion": "b"})";
    require_success(folder.tokenize(null + "\n" + completion("held", "out"), "--seq 8"));
    CHECK(folder.windows(8) == "a[b<|end|>]" + padded("", 3, 8));
}

TEST_CASE("tokenize.py: a conversation lies within one window, and windows are filled up" *
          doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    std::string lines;
    for (const char* letters : {"aaaa", "bbbbbb", "cc", "dddddd"}) lines += completion(letters, "x");
    require_success(folder.tokenize(lines + completion("held", "out"), "--seq 12"));
    CHECK(folder.windows(12) == "aaaa[x<|end|>]cc[x<|end|>]<|end|><|end|>\nbbbbbb[x<|end|>]" +
                                    padded("", 8, 12) + "\ndddddd[x<|end|>]" + padded("", 8, 12));
    const std::string more = completion("", "whole") + completion("held", "out");
    require_success(folder.tokenize(lines + more, "--seq 12"));
    CHECK(contains(folder.windows(12), "w[hole<|end|>]"));  // nothing precedes the first token
    // Several processes write the same files as one.
    for (int i = 0; i < 1000; i++) lines += completion(std::to_string(i), std::to_string(i * i));
    require_success(folder.tokenize(lines, "--seq 64 --processes 1"));
    const auto one = folder.files();
    require_success(folder.tokenize(lines, "--seq 64 --processes 3"));
    CHECK(folder.files() == one);
    // Plain text in the same folder afterwards has no mask.
    folder.write("text", "some text\nof two lines\n");
    require_success(folder.run("--out tokens text"));
    CHECK(!load_corpus(folder / "tokens").train.masked());
}

TEST_CASE("tokenize.py: conversations without an answer or longer than --seq are counted" *
          doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    const std::string good = completion("abc", "x");
    const Ended ended = folder.tokenize(
        good + good + completion("12345678901234567890", "x") + completion("held", "out") +
            completion("123", std::string(20, 'y')) + completion("z", " ") +
            R"({"messages": [{"role": "user", "content": "q"}]})" + "\n" +
            R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]})",
        "--seq 10 --hold-out 0.2");
    require_success(ended);
    CHECK(contains(ended.out, "1 conversations are left out: the same line came before.\n"));
    CHECK(contains(ended.out, "1 conversations are longer than --seq 10 and cut after so many tokens.\n"));
    CHECK(contains(ended.out, "1 conversations are left out: the first answer comes after --seq 10 tokens."));
    CHECK(contains(ended.out, "3 conversations are left out: they have no answer, or an empty one.\n"));
    CHECK(contains(folder.windows(10) + "\n", "123[yyyyyyy]\n"));
}

TEST_CASE("tokenize.py: conversations that cannot be read are rejected in one sentence" *
          doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    const std::string good = completion("abc", "x") + completion("def", "y");
    const std::string chat =
        R"({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})";
    auto rejected = [&](const std::string& lines, const std::string& who, const std::string& what = "",
                        const std::string& flags = "--seq 32 --processes 2") {
        const Ended ended = folder.tokenize(lines, flags);
        check_failed(ended, who, what);
        CHECK(!contains(ended.error, "Traceback"));
        CHECK(!fs::exists(folder.path / "tokens"));
    };
    rejected(good, "c.jsonl", "--seq", "");
    check_failed(folder.run("c.jsonl tokenizers.py --seq 32"), "c.jsonl", "text");
    check_failed(folder.run("c.jsonl --seq 32", "--tokenizer model/tokenizer.json "), "c.jsonl", "FOLDER");
    check_failed(folder.run("c.jsonl --seq 32", "--train-bpe 300 "), "c.jsonl", "FOLDER");
    check_failed(folder.run("--prompt x", "--train-bpe 300 "), "--prompt");
    check_failed(folder.run(""), "no text");
    folder.write("binary", std::string("a\0b", 3)), folder.write("empty", ""), folder.write("text", "ab\n");
    check_failed(folder.run("none"), "none", "No such file");
    check_failed(folder.run("none.jsonl --seq 32"), "none.jsonl", "No such file");
    fs::create_directory(folder.path / "bare");  // not asked for on the hub
    check_failed(folder.run("text", "--tokenizer bare "), "bare", "no tokenizer.json");
    check_failed(folder.run("text binary"), "binary", "not UTF-8 text");
    check_failed(folder.run("text empty"), "empty", "give text");
    folder.write("letter", "x");  // all of it would be held out
    check_failed(folder.run("letter"), "train.bin", "give more text");
    check_failed(folder.run("text --hold-out 1e-20"), "--hold-out", "0.001");
    check_failed(folder.run("c.jsonl --seq 32 --hold-out 0.9999"), "--hold-out", "0.999");
    CHECK(!fs::exists(folder.path / "tokens"));
    check_failed(folder.run("text --out text/tokens"), "text/tokens", "Not a directory");
    rejected(completion("abc", "x"), "two conversations");
    rejected(good + "{\"messages\"\n", "c.jsonl:3", "JSON");
    rejected(good + std::string(100000, '[') + "\n", "c.jsonl:3", "JSON");
    rejected(good + completion("\\ud800", "x"), "c.jsonl:3", "surrogates not allowed");
    rejected(good + "[1]\n", "c.jsonl:3", "object");
    rejected(good + "{\"text\": \"abc\"}\n", "c.jsonl:3", "completion");
    rejected(good + "{\"messages\": [1]}\n", "c.jsonl:3", "role");
    rejected(completion("abc", "") + completion("def", ""), "answer");
    auto with_template = [&](const std::string& chat_template, const std::string& what) {
        folder.write("model/tokenizer_config.json", config_with(chat_template));
        rejected(chat + "\n" + good, "c.jsonl:1", what);
    };
    with_template("raise_exception('roles must alternate')", "roles must alternate");
    with_template("messages[7]", "tokenizer_config.json fails");
    with_template("", "cannot be read");
    with_template("str(len(messages)) + " + CHAT, "tokenizer_config.json does not write the beginning");
    folder.write("model/tokenizer_config.json", "{}");
    rejected(chat + "\n" + good, "c.jsonl:1", "no chat_template");
    folder.write("model/chat_template.jinja", "messages[8]");  // counts before tokenizer_config.json
    rejected(chat + "\n" + good, "c.jsonl:1", "chat_template.jinja fails");
    for (const std::string& wrong : {std::string("{"), std::string(100000, '[')}) {
        folder.write("model/tokenizer_config.json", wrong);
        rejected(good, "tokenizer_config.json");
    }
    folder.write("model/tokenizer_config.json", config_with(CHAT));
    folder.write("model/config.json", R"({"vocab_size": 200})");
    rejected(completion("\\u00e9", "x") + good, "tokens of the text", "config.json");
    folder.write("model/config.json", R"({"vocab_size": 100})");
    folder.write("text", std::string(80, 'a') + "\n\xC3\xA9\n");  // outside only in what is held out
    check_failed(folder.run("--out tokens text"), "tokens of the text", "config.json");
    CHECK(!fs::exists(folder.path / "tokens"));
    folder.write("model/config.json", R"({"vocab_size": 259})");
    folder.write("tokenizers.py", "raise ImportError()");
    rejected(good, "pip install tokenizers");
    folder.write("tokenizers.py", TOKENIZERS);
    folder.write("jinja2/__init__.py", "raise ImportError()");
    fs::remove(folder.path / "model/chat_template.jinja");
    rejected(chat + "\n" + good, "pip install jinja2");
    require_success(folder.tokenize(good));  // needs no template
}

TEST_CASE("tokenize.py: an added token is plain text, also where tokens are spelled in bytes" *
          doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    std::string byte_level = TOKENIZERS;  // with GPT-2's alphabet, which has no space
    replace(byte_level, "ByteFallback", "ByteLevel");
    replace(byte_level, "\"<0x%02X>\" % t if", "BYTES[t] if");
    folder.write("tokenizers.py", byte_level + R"py(
OWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(256) if byte not in OWN]
BYTES = [chr(byte) if byte in OWN else chr(256 + OTHERS.index(byte)) for byte in range(256)]
)py");
    folder.write("model/tokenizer.json", R"(["<|begin of text|>"])");
    for (const char* empty : {"config.json", "tokenizer_config.json", "chat_template.jinja"})
        folder.write(std::string("model/") + empty, "");  // as if they were not there
    folder.write("text", "some text\nand more\n");
    require_success(folder.run("--out tokens text"));
    const Vocabulary pieces = Vocabulary::read(folder / "tokens/vocabulary.json");
    CHECK(pieces.decode({'a', ' ', 256}) == "a <|begin of text|>");
    require_success(folder.tokenize(completion("abc", "x") + completion("def", "y")));
}

TEST_CASE("train: learns what counts in conversations, and resumes with the same bits and the same mask" *
          doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    require_success(folder.tokenize(same_answers()));
    const std::string run = "--device cpu --data tokens --batch 4 --seq 32 --sample-every 0 --warmup 2 "
                            "--eval-every 0 --schedule constant ";
    const Ended whole = train(folder, run + "--steps 20 --out whole");
    require_success(whole);
    const double first = number_after(whole.out, "validation | step 0 | loss "),
                 last = number_after(whole.out, "validation | step 20 | loss ");
    CHECK(first > 5);
    CHECK(last < 0.2);  // a loss over all tokens could not fall so far
    require_success(train(folder, run + "--steps 10 --out part"));
    require_success(train(folder, "--device cpu --resume part --steps 20"));
    auto weights = [&](const char* out) {
        return read_file(folder.path / out / "step-000020/model.safetensors") +
               read_file(folder.path / out / "step-000020/optimizer.safetensors");
    };
    CHECK(weights("whole") == weights("part"));

    const std::string mask = read_file(folder.path / "tokens/train.mask");
    write_file(folder.path / "tokens/train.mask", std::string(mask.size(), '\1'));
    check_rejected(folder, "--device cpu --resume whole --steps 21", "--data");
    fs::remove(folder.path / "tokens/train.mask");
    check_rejected(folder, "--device cpu --resume whole --steps 21", "--data");
    write_file(folder.path / "tokens/train.mask", std::string(mask.size(), '\0'));
    check_one_sentence(train(folder, run + "--steps 1 --out none"), "--data");
    write_file(folder.path / "tokens/train.mask", mask.substr(1));
    check_rejected(folder, "--device cpu --resume whole --steps 21", "train.mask");
}

TEST_CASE("train: with a mask, two ranks have the losses of one with twice the micro-batches" *
          doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    require_success(folder.tokenize(same_answers()));
    const std::string run =
        "--device cpu --data tokens --batch 2 --seq 32 --sample-every 0 --recipe fp32 --steps 3 ";
    require_success(train(folder, run + "--accumulate 4 --out '' --log log"));
    const auto one = logged(folder, "step"), validated = logged(folder, "validation");
    const std::string port = "MASTER_PORT=" + std::to_string(free_port()) + " ";
    require_success(shell(folder, port + "'" + program() + "' " + run +
                                      "--accumulate 2 --ranks 2 --shard all --out '' --log log"));
    const auto two = logged(folder, "step");
    REQUIRE((one.size() == 3 && two.size() == 3));
    // FP32 sums in another order, since the embedding is tied. Means of means would differ by more than 1e-3.
    auto check_loss = [](const nlohmann::json& a, const nlohmann::json& b) {
        CHECK(a.at("loss").get<double>() == doctest::Approx(b.at("loss").get<double>()).epsilon(1e-6));
    };
    for (size_t i = 0; i < 3; i++) check_loss(one[i], two[i]);
    const auto again = logged(folder, "validation");
    for (size_t i = 0; i < validated.size(); i++) check_loss(validated[i], again[i]);
}

TEST_CASE("train: windows and steps in which no token counts are reported, and nothing is NaN") {
    Folder folder;
    std::vector<uint16_t> tokens;
    for (int i = 0; i < 1601; i++) tokens.push_back(static_cast<uint16_t>(i * i % 251));
    std::string mask(tokens.size(), '\0');
    for (size_t i = 0; i < 400; i++) mask[i] = '\1';
    for (const char* name : {"train", "val"}) {
        folder.write(std::string(name) + ".bin", token_file(tokens));
        folder.write(std::string(name) + ".mask", mask);
    }
    const std::string run = "--device cpu --data train.bin,val.bin --batch 1 --seq 16 ";
    const Ended ended = train(
        folder, run + "--steps 40 --warmup 0 --eval-every 0 --sample-every 0 --out '' --log log");
    require_success(ended);
    CHECK(contains(ended.out, "75 of the 100 windows"));
    int64_t skipped = 0;
    for (const auto& line : logged(folder, "step")) {
        REQUIRE(line.at("loss").is_number());
        CHECK((line.at("loss") == 0) == line.at("skipped"));
        skipped += line.at("skipped").get<bool>();
    }
    CHECK((skipped > 20 && skipped < 40));  // more than MOST_SKIPPED: the run has not diverged
    CHECK(contains(ended.out, "skipped: no token counts"));
    folder.write("val.mask", std::string(mask.size(), '\0'));
    check_one_sentence(train(folder, run + "--steps 1"), "--data");
}

TEST_CASE("train: --steps 0 prints perplexity, bits per byte, and a sample in the model's own tokens" *
          doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    require_success(folder.tokenize(same_answers()));
    const std::string run = "--device cpu --data tokens --batch 4 --seq 32 ";
    require_success(train(folder, run + "--sample-every 0 --steps 20 --warmup 2 --schedule constant"));
    const std::string model = "out/step-000020";
    fs::copy_file(folder.path / "model/tokenizer.json", folder.path / model / "tokenizer.json");
    const std::string evaluate = "'" + program() + "' " + run + "--steps 0 --log log --model " + model;
    const Ended silent = shell(folder, evaluate);
    require_success(silent);
    CHECK(!contains(silent.out, "sample |"));
    const nlohmann::json line = logged(folder, "validation").at(0);
    const double loss = line.at("loss");
    CHECK(line.at("perplexity").get<double>() == doctest::Approx(std::exp(loss)));
    // Three letters and the end of the text count in each conversation; the end stands for no byte.
    const double bits = loss / std::log(2.0) * 4 / 3;
    CHECK(line.at("bits_per_byte").get<double>() == doctest::Approx(bits).epsilon(1e-9));
    const Ended sampled = shell(folder, "PYTHONPATH=. " + evaluate + " --temperature 0 --prompt \"it's 7\"");
    require_success(sampled);
    CHECK(contains(sampled.out, "----------\nit's 7yes<|end|>"));
    const std::vector<int32_t> tokens = logged(folder, "sample").at(0).at("tokens");
    REQUIRE(tokens.size() == 32);
    CHECK(std::vector<int32_t>(tokens.begin(), tokens.begin() + 10) ==
          std::vector<int32_t>{'i', 't', '\'', 's', ' ', '7', 'y', 'e', 's', 258});
    check_one_sentence(shell(folder, "PYTHONPATH=. " + evaluate + " --prompt " + std::string(40, 'x')),
                       "--prompt");
    folder.write(model + "/tokenizer.json", R"(["<|user|>", "<|assistant|>", "<|end|>", "<|more|>"])");
    check_one_sentence(shell(folder, "PYTHONPATH=. " + evaluate + " --prompt '<|more|>'"), "vocabulary");
    const Ended dash = shell(folder, "PYTHONPATH=. " + evaluate + " --prompt '--d'");  // no flag of the script
    CHECK(!contains(dash.out, "expected one argument"));
    folder.write("tokenizers.py", "raise ImportError()");
    const Ended numbers = shell(folder, "PYTHONPATH=. " + evaluate + " --prompt c");
    require_success(numbers);
    CHECK(contains(numbers.out, "--prompt cannot be tokenized"));
    CHECK(contains(numbers.out, "pip install tokenizers"));
    CHECK(contains(numbers.out, "----------\n<0><"));
    const Ended without = shell(folder, "PATH=/nowhere " + evaluate + " --prompt c");
    require_success(without);
    CHECK(contains(without.out, "python3 is missing"));
}

TEST_CASE("tokenize.py: with tokenizers and jinja2 themselves, the assistant's tokens count" *
          doctest::skip(NO_PACKAGES)) {
    Folder folder;
    folder.write("make.py", R"(
import json, os, tokenizers
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = tokenizers.decoders.ByteLevel()
made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
os.mkdir("model")
made.save("model/tokenizer.json")
chat = """{%- for message in messages %}
    {%- if message.role == "tool" %}{{ raise_exception("unknown role " + message.role) }}{% endif %}
    {{- "<|im_start|>" + message.role + "\n" + message.content + eos_token + "\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\n" }}
{%- endif %}"""
json.dump({"chat_template": chat, "eos_token": "<|im_end|>"}, open("model/tokenizer_config.json", "w"))
)");
    require_success(shell(folder, "python3 make.py"));
    const std::string chat = R"({"messages": [{"role": "user", "content": "h\u00e9"}, )"
                             R"({"role": "assistant", "content": " \u00fc b"}]})";
    const std::string tokenize = "python3 '" + fs::absolute("data/tokenize.py").string() +
                                 "' --tokenizer model --out tokens --seq 40 c.jsonl";
    folder.write("c.jsonl", chat + "\n" + completion("held", "out") + "\n");
    require_success(shell(folder, tokenize));
    const TokenStream stream = load_corpus(folder / "tokens").train;
    std::vector<int32_t> counted;
    for (int64_t i = 0; i < stream.size(); i++) {
        int32_t target = stream[i];
        stream.mask(i, 1, &target);
        if (target != NO_TARGET) counted.push_back(target);
    }
    CHECK(Vocabulary::read(folder / "tokens/vocabulary.json").decode(counted) == " \xC3\xBC b<|im_end|>");
    folder.write("c.jsonl", chat + "\n" + R"({"messages": [{"role": "tool", "content": "x"}, )"
                                          R"({"role": "assistant", "content": "y"}]})" + "\n");
    check_failed(shell(folder, tokenize), "c.jsonl:2", "unknown role tool");
}
