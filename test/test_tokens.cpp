// test_tokens.cpp - data/tokens.cpp: corpora, the split into training and validation, token files, and
// vocabularies.
#include <doctest/doctest.h>

#include <map>
#include <numeric>

#include "../model.h"
#include "token_files.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::token_files;

namespace {

std::string text_of(const TokenStream& stream) {
    std::string text;
    for (int32_t token : tokens_of(stream)) text += static_cast<char>(token);
    return text;
}

}  // namespace

TEST_CASE("TokenStream: joined and cut streams of several widths give the tokens in order") {
    FRESH_RANDOM(rng);
    for (int round = 0; round < 50; round++) {
        TokenStream stream;
        std::vector<int32_t> expected;
        for (int64_t piece = rng.below(6); piece > 0; piece--) {
            std::vector<uint8_t> bytes(static_cast<size_t>(rng.below(9)));
            std::vector<uint16_t> shorts(static_cast<size_t>(rng.below(9)));
            std::vector<uint32_t> words(static_cast<size_t>(rng.below(9)));
            for (auto& x : bytes) x = static_cast<uint8_t>(rng.bits()), expected.push_back(x);
            for (auto& x : shorts) x = static_cast<uint16_t>(rng.bits()), expected.push_back(x);
            for (auto& x : words)
                x = static_cast<uint32_t>(rng.below(INT32_MAX)), expected.push_back(static_cast<int32_t>(x));
            for (const TokenStream& s : {stream_of(bytes), stream_of(shorts), stream_of(words)})
                stream.append(s);
        }
        REQUIRE(tokens_of(stream) == expected);
        CHECK(stream.largest() ==
              (expected.empty() ? -1 : *std::max_element(expected.begin(), expected.end())));
        const int64_t first = rng.below(stream.size() + 1), n = rng.below(stream.size() - first + 1);
        CHECK(tokens_of(stream.part(first, n)) ==
              std::vector<int32_t>(expected.begin() + first, expected.begin() + first + n));
        CHECK(tokens_of(stream.part(first, n).part(0, n / 2)) == tokens_of(stream.part(first, n / 2)));
    }
}

TEST_CASE("load_corpus: without --data it is the compiler's headers, the same each time") {
    const Corpus corpus = load_corpus("");
    CHECK(corpus.train.size() > 1000000);
    CHECK(corpus.train.size() + corpus.validation.size() <= 32 << 20);
    // Every 20th file, but files have very different sizes.
    CHECK(corpus.validation.size() > corpus.train.size() / 100);
    CHECK(corpus.validation.size() < corpus.train.size() / 5);
    CHECK(corpus.tokens_in_use == 256);
    CHECK(corpus.vocabulary.size() == 256);
    const std::string text = text_of(corpus.train);
    CHECK(text.find('\0') == std::string::npos);
    CHECK(contains(text, "namespace std"));
    CHECK(text_of(load_corpus("").train) == text);
    CHECK(text_of(load_corpus("").validation) == text_of(corpus.validation));
}

TEST_CASE("load_corpus: of a few text files the last tenth is for validation") {
    Folder folder;
    const std::string a(1234, 'a'), b = "\xC3\xA9t\xC3\xA9 in UTF-8\r\n";
    for (const std::string& data :
         {folder.write("a.txt", a), folder.write("a.txt", a) + "," + folder.write("b", b)}) {
        const Corpus corpus = load_corpus(data);
        const std::string all = data.find(',') == std::string::npos ? a : a + b;
        CHECK(text_of(corpus.train) + text_of(corpus.validation) == all);
        CHECK(corpus.validation.size() == (static_cast<int64_t>(all.size()) + 9) / 10);
        CHECK(contains(corpus.description, data));
    }
}

TEST_CASE("load_corpus: of a folder's text files every 20th is for validation, and none is read twice") {
    Folder folder;
    std::map<std::string, std::string> files;  // sorted by bytes, as the corpus must be in any locale
    for (int i = 0; i < 61; i++) {
        const std::string name = std::string(i % 3 ? "sub/" : "") + (i % 2 ? "Z" : "a") + std::to_string(i);
        files[name] = "This is text number " + std::to_string(i) + ".\n";
        folder.write("in/" + name, files[name]);
    }
    folder.write("in/z/copy", "This is text number 7.\n");
    folder.write("in/binary", std::string("\x7F" "ELF\0", 5));
    folder.write("in/.git/config", "hidden");
    folder.write("in/.hidden", "hidden");
    folder.write("in/empty", "");
    fs::create_symlink("a0", folder.path / "in/link");
    fs::create_symlink("nothing", folder.path / "in/dangling");
    fs::create_directory_symlink("..", folder.path / "in/loop");
    std::string train, validation;
    std::vector<int> held_out;  // their positions in the order
    const Corpus corpus = load_corpus(folder / "in");
    const std::string trained = text_of(corpus.train);
    int index = 0;
    for (const auto& [name, text] : files) {
        const bool is_trained = contains(trained, text);
        (is_trained ? train : validation) += text;
        if (!is_trained) held_out.push_back(index);
        index++;
    }
    CHECK(trained == train);
    CHECK(text_of(corpus.validation) == validation);
    REQUIRE(held_out.size() == 3);
    CHECK((held_out[1] == held_out[0] + 20 && held_out[2] == held_out[1] + 20));
    CHECK(text_of(load_corpus(folder / "in/").train) == trained);
}

TEST_CASE("load_corpus: llm.c's token files of both widths are read back") {
    Folder folder;
    FRESH_RANDOM(rng);
    std::vector<uint16_t> narrow(1003);
    std::vector<uint32_t> wide(1003);
    for (auto& t : narrow) t = static_cast<uint16_t>(rng.below(65536));
    for (auto& t : wide) t = static_cast<uint32_t>(rng.below(128256));
    narrow[500] = 65535, wide[500] = 128255;
    for (int version : {1, 7}) {  // files of llm.c with 4-byte tokens have version 7
        const Corpus corpus = load_corpus(folder.write("wide.bin", token_file(wide, version)));
        std::vector<int32_t> all = tokens_of(corpus.train);
        CHECK(corpus.validation.size() == 101);
        for (int32_t t : tokens_of(corpus.validation)) all.push_back(t);
        CHECK(all == std::vector<int32_t>(wide.begin(), wide.end()));
        CHECK(corpus.tokens_in_use == 128256);
        CHECK(corpus.vocabulary.empty());
    }
    const std::string train = folder.write("x_train.bin", token_file(narrow)),
                      val = folder.write("x_val.bin", token_file(wide));
    const std::string more = folder.write("other.bin", token_file(std::vector<uint16_t>{1, 2, 3}));
    for (const std::string& data : {train + "," + val, val + "," + train}) {
        const Corpus corpus = load_corpus(data);
        CHECK(tokens_of(corpus.train) == std::vector<int32_t>(narrow.begin(), narrow.end()));
        CHECK(tokens_of(corpus.validation) == std::vector<int32_t>(wide.begin(), wide.end()));
    }
    CHECK(tokens_of(load_corpus(more + "," + val).train) == std::vector<int32_t>{1, 2, 3});
    // The only file: it is split. Named twice, it is read once, so that nothing held out is trained on.
    for (const std::string& data : {val, val + "," + val}) {
        const Corpus one = load_corpus(data);
        CHECK(one.train.size() + one.validation.size() == 1003);
    }
}

TEST_CASE("load_corpus: a mask beside a token file makes targets that do not count") {
    Folder folder;
    std::vector<uint16_t> a(41), b(40);
    std::iota(a.begin(), a.end(), uint16_t{0});
    std::iota(b.begin(), b.end(), uint16_t{41});
    folder.write("a_train.bin", token_file(a)), folder.write("b_train.bin", token_file(b));
    std::string mask(41, '\0');
    for (size_t i = 0; i < 41; i += 3) mask[i] = '\1';
    std::fill_n(mask.begin() + 21, 10, '\0');
    folder.write("a_train.mask", mask);
    const Corpus corpus = load_corpus(folder.path.string());  // the last tenth is held out; all of b counts
    const TokenStream& stream = corpus.train;
    REQUIRE(stream.size() == 72);
    CHECK(stream.masked());
    CHECK(!corpus.validation.masked());
    Loader loader(stream, 2, 5, 1);
    CHECK(loader.windows_without_target() == 2);  // targets 21 to 25 and 26 to 30
    for (int i = 0; i < 7; i++) {
        int32_t tokens[10], targets[10];
        loader.next(tokens, targets);
        for (size_t t = 0; t < 10; t++) {
            const auto next = static_cast<size_t>(tokens[t] + 1);
            CHECK(targets[t] == (next >= 41 || mask[next] ? int32_t(next) : NO_TARGET));
        }
    }
    std::vector<int32_t> targets(30, 7);  // of a part that begins within the file with the mask
    stream.part(20, 40).part(3, 30).mask(2, 28, targets.data() + 2);
    for (size_t i = 2; i < 30; i++) CHECK(targets[i] == (i + 23 >= 41 || mask[i + 23] ? 7 : NO_TARGET));
    CHECK((targets[0] == 7 && targets[1] == 7));
}

TEST_CASE("vocabulary: bytes of text are those of tokens that are not special") {
    Folder folder;
    const std::string plain = table(R"(["a", "\u00c3\u00a9", "<end>"])", "3");
    const std::vector<int32_t> tokens = {0, 1, NO_TARGET, 2, 1, 9};
    auto bytes = [&](const std::string& file) {
        return Vocabulary::read(folder.write("vocabulary.json", file)).text_bytes(tokens.data(), 6);
    };
    auto with = [&](const std::string& special) {
        return plain.substr(0, plain.size() - 1) + ", \"special\": " + special + "}";
    };
    CHECK(bytes(with("[2]")) == 5);
    CHECK(bytes(with("[]")) == 10);
    CHECK(bytes(plain) == -1);  // not known
    CHECK(Vocabulary::bytes().text_bytes(tokens.data(), 6) == 5);
    for (const char* wrong : {"2", "[3]", "[-1]", "[\"<end>\"]", "{}"})
        check_error([&] { bytes(with(wrong)); }, "vocabulary.json");
}

TEST_CASE("vocabulary: bytes need no table") {
    std::string all;
    std::vector<int32_t> tokens;
    for (int byte = 0; byte < 256; byte++) all += static_cast<char>(byte), tokens.push_back(byte);
    CHECK(Vocabulary::bytes().encode(all) == tokens);
    CHECK(Vocabulary::bytes().decode(tokens) == all);
    CHECK(Vocabulary::bytes().decode({65, 256, -1}) == "A<256><-1>");
    CHECK(Vocabulary::bytes().encode("").empty());
}

TEST_CASE("vocabulary: the table has the bytes of every piece") {
    Folder folder;
    const std::string pieces = R"(["a", "ab", "b", "", "\u0000", "\u00c3\u00a9", "\u00ff\"\\", "abc", "b"])";
    const Vocabulary v = Vocabulary::read(folder.write("vocabulary.json", table(pieces, "9")));
    CHECK(v.size() == 9);
    CHECK(v.decode({1, 3, 5, 9}) == "ab<3>\xC3\xA9<9>");
    CHECK(v.decode({4, 6}) == std::string("\0\xFF\"\\", 4));
    // The longest piece counts; of equal pieces the last.
    CHECK(v.encode("ababcb\xC3\xA9") == std::vector<int32_t>{1, 7, 8, 5});
    check_error([&] { v.encode("ax"); }, "--prompt");

    const std::string path =
        folder.write("x.bin", token_file(std::vector<uint16_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 0}));
    CHECK(load_corpus(path).vocabulary.size() == 9);
    CHECK(load_corpus(path).tokens_in_use == 9);
    folder.write("vocabulary.json", table(R"(["a", "b"])", "2"));
    check_data_error(path, "8");  // the table has no such token
    const std::string fits = folder.write("a.bin", token_file(std::vector<uint16_t>{0, 1, 0, 1}));
    check_data_error(fits + "," + path, "x.bin");
}

TEST_CASE("load_corpus: token files of several folders must have the same vocabulary") {
    Folder folder;
    const std::vector<uint16_t> tokens = {0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1};
    const std::string a = folder.write("a/x.bin", token_file(tokens)),
                      b = folder.write("b/x.bin", token_file(tokens)),
                      c = folder.write("c/x.bin", token_file(tokens));
    const std::string one = table(R"(["a", "b"])", "2"), two = table(R"(["a", "c"])", "2"),
                      special = one.substr(0, one.size() - 1) + R"(, "special": [1]})";
    folder.write("a/vocabulary.json", one);
    for (const std::string& data : {a + "," + c, c + "," + a})  // c has none
        CHECK(load_corpus(data).vocabulary.decode({1}) == "b");
    folder.write("b/vocabulary.json", one + "\n");
    CHECK(load_corpus(folder.path.string()).vocabulary.size() == 2);
    for (const std::string& other : {two, special, table(R"(["a", "b", "c"])", "3")}) {
        folder.write("b/vocabulary.json", other);
        for (const std::string& data : {a + "," + b, b + "," + a, a + "," + c + "," + b})
            check_error([&] { load_corpus(data); }, folder / "a/vocabulary.json",
                        folder / "b/vocabulary.json");
    }
}
