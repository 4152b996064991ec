// test_tokenize.cpp - data/tokenize.py: it packs conversations into windows and writes masks. The last test
// has the real Python packages; the others have small ones of the tests (conversations.h).
#include <doctest/doctest.h>

#include "conversations.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::conversations;

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

TEST_CASE("tokenize.py: in a folder, conversations are read as conversations" * doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    folder.write("chats/c.jsonl", completion("abc", "x") + completion("def", "y"));
    require_success(folder.run("--out tokens chats --seq 8"));
    CHECK(contains(folder.windows(8), "abc[x<|end|>]"));
    folder.write("chats/text", "some text\n");
    check_failed(folder.run("--out other chats --seq 8"), "c.jsonl", "give one kind");
    CHECK(!fs::exists(folder.path / "other"));
}

TEST_CASE("tokenize.py: tokens are never without their mask, also if writing it fails" *
          doctest::skip(NO_PYTHON)) {
    const ChatFolder folder;
    const std::string lines = completion("abc", "x") + completion("def", "y");
    require_success(folder.tokenize(lines));
    fs::create_directory(folder.path / "tokens/train.mask.tmp");  // cannot be written
    check_failed(folder.tokenize(lines), "train.mask");
    CHECK(!fs::exists(folder.path / "tokens/train.bin"));
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
    const std::vector<int32_t> tokens = token_files::tokens_of(stream);
    std::vector<int32_t> counted;
    for (int64_t i = 0; i < stream.size(); i++) {
        int32_t target = tokens[i];
        stream.mask(i, 1, &target);
        if (target != NO_TARGET) counted.push_back(target);
    }
    CHECK(Vocabulary::read(folder / "tokens/vocabulary.json").decode(counted) == " \xC3\xBC b<|im_end|>");
    folder.write("c.jsonl", chat + "\n" + R"({"messages": [{"role": "tool", "content": "x"}, )"
                                          R"({"role": "assistant", "content": "y"}]})" + "\n");
    check_failed(shell(folder, tokenize), "c.jsonl:2", "unknown role tool");
}
