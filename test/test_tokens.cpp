// test_tokens.cpp - what the model is fed: which bytes are trained on and which held out, llm.c's token files and their tables
// taken apart and lied about, and an order of the windows that is a permutation and resumes exactly.
#include <doctest/doctest.h>

#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>
#include <set>

#include "../coat.h"
#include "../data/tokens.h"
#include "random.h"

using namespace coat;
using coat::test::count;
using coat::test::Random;

namespace {

namespace fs = std::filesystem;

struct Folder {  // removed when the test ends
    fs::path path;
    Folder() {
        std::string name = (fs::temp_directory_path() / "coat-tokens-XXXXXX").string();
        REQUIRE(mkdtemp(name.data()));
        path = name;
    }
    ~Folder() {
        std::error_code ignored;
        fs::remove_all(path, ignored);
    }
    std::string write(const std::string& name, const std::string& content) const {
        fs::create_directories((path / name).parent_path());
        std::ofstream(path / name, std::ios::binary) << content;
        return (path / name).string();
    }
};

std::string text_of(const TokenStream& stream) {
    std::string text;
    for (int64_t i = 0; i < stream.size(); i++) text += static_cast<char>(stream[i]);
    return text;
}

std::vector<int32_t> tokens_of(const TokenStream& stream) {
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < stream.size(); i++) tokens.push_back(stream[i]);
    return tokens;
}

template <class Token>
TokenStream stream_of(const std::vector<Token>& tokens) {
    const auto memory = std::make_shared<const std::vector<Token>>(tokens);
    return TokenStream(std::shared_ptr<const void>(memory, memory->data()), sizeof(Token), static_cast<int64_t>(tokens.size()));
}

TokenStream counting(int64_t n) {
    std::vector<uint32_t> tokens(static_cast<size_t>(n));
    std::iota(tokens.begin(), tokens.end(), 0u);
    return stream_of(tokens);
}

template <class Token>
std::string token_file(const std::vector<Token>& tokens, int32_t version = 1) {
    int32_t header[256] = {sizeof(Token) == 2 ? 20240520 : 20240801, version, static_cast<int32_t>(tokens.size())};
    std::string file(reinterpret_cast<const char*>(header), sizeof header);
    return file.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token));
}

void put(std::string* file, size_t index, int32_t value) { file->replace(index * 4, 4, reinterpret_cast<const char*>(&value), 4); }

std::string table(const std::string& pieces, const std::string& size) {
    return R"({"format": "coat vocabulary", "version": 1, "size": )" + size + R"(, "pieces": )" + pieces + "}";
}

// The action is refused with one sentence that names the culprit and ends as a sentence does.
template <class Action>
void check_refused(const Action& action, const std::string& names) {
    std::string said;
    try {
        action();
    } catch (const Error& error) {
        said = error.what();
    }
    CHECK_MESSAGE(said.find(names) != std::string::npos, "said \"" << said << "\", which does not name " << names);
    CHECK_MESSAGE((!said.empty() && said.back() == '.' && said.find('\n') == std::string::npos), said);
}

void check_data_refused(const std::string& data, const std::string& names) {
    INFO("--data ", data);
    check_refused([&] { load_corpus(data); }, names);
}

std::vector<int32_t> windows_of_epoch(Loader& loader) {  // with B = T = 1, of counting(): the windows in their order
    std::vector<int32_t> order;
    for (int64_t i = 0; i < loader.windows(); i++) {
        int32_t token, target;
        loader.next(&token, &target);
        CHECK(target == token + 1);
        order.push_back(token);
    }
    return order;
}

bool is_permutation_of_all(std::vector<int32_t> order) {
    std::sort(order.begin(), order.end());
    for (size_t i = 0; i < order.size(); i++)
        if (order[i] != static_cast<int32_t>(i)) return false;
    return true;
}

}  // namespace

TEST_CASE("tokens: streams of several widths, joined and cut, are the tokens in their order") {
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
            for (auto& x : words) x = static_cast<uint32_t>(rng.below(INT32_MAX)), expected.push_back(static_cast<int32_t>(x));
            for (const TokenStream& s : {stream_of(bytes), stream_of(shorts), stream_of(words)}) stream.append(s);
        }
        REQUIRE(tokens_of(stream) == expected);
        CHECK(stream.largest() == (expected.empty() ? -1 : *std::max_element(expected.begin(), expected.end())));
        const int64_t first = rng.below(stream.size() + 1), n = rng.below(stream.size() - first + 1);
        CHECK(tokens_of(stream.part(first, n)) == std::vector<int32_t>(expected.begin() + first, expected.begin() + first + n));
        CHECK(tokens_of(stream.part(first, n).part(0, n / 2)) == tokens_of(stream.part(first, n / 2)));
    }
}

TEST_CASE("tokens: without --data the corpus is the compiler's headers, the same each time") {
    const Corpus corpus = load_corpus("");
    CHECK(corpus.train.size() > 1000000);
    CHECK(corpus.train.size() + corpus.validation.size() <= 32 << 20);
    CHECK(corpus.validation.size() > corpus.train.size() / 100);  // every 20th file, and files are of very different sizes
    CHECK(corpus.validation.size() < corpus.train.size() / 5);
    CHECK(corpus.tokens_in_use == 256);
    CHECK(corpus.vocabulary.size() == 256);
    const std::string text = text_of(corpus.train);
    CHECK(text.find('\0') == std::string::npos);
    CHECK(text.find("namespace std") != std::string::npos);
    CHECK(text_of(load_corpus("").train) == text);
    CHECK(text_of(load_corpus("").validation) == text_of(corpus.validation));
}

TEST_CASE("tokens: of a few text files the last tenth is held out") {
    Folder folder;
    const std::string a(1234, 'a'), b = "\xC3\xA9t\xC3\xA9 in UTF-8\r\n";
    for (const std::string& data : {folder.write("a.txt", a), folder.write("a.txt", a) + "," + folder.write("b", b)}) {
        const Corpus corpus = load_corpus(data);
        const std::string all = data.find(',') == std::string::npos ? a : a + b;
        CHECK(text_of(corpus.train) + text_of(corpus.validation) == all);
        CHECK(corpus.validation.size() == (static_cast<int64_t>(all.size()) + 9) / 10);
        CHECK(corpus.description.find(data) != std::string::npos);
    }
}

TEST_CASE("tokens: of a folder's text files, in the order of their bytes, every 20th is held out and none is read twice") {
    Folder folder;
    std::map<std::string, std::string> files;  // by name: std::map is in the order of bytes, as the corpus must be in any locale
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
    std::vector<int> held_out;  // their places in the order
    const Corpus corpus = load_corpus((folder.path / "in").string());
    const std::string trained = text_of(corpus.train);
    int place = 0;
    for (const auto& [name, text] : files) {
        const bool is_trained = trained.find(text) != std::string::npos;
        (is_trained ? train : validation) += text;
        if (!is_trained) held_out.push_back(place);
        place++;
    }
    CHECK(trained == train);
    CHECK(text_of(corpus.validation) == validation);
    REQUIRE(held_out.size() == 3);
    CHECK((held_out[1] == held_out[0] + 20 && held_out[2] == held_out[1] + 20));
    CHECK(text_of(load_corpus((folder.path / "in/").string()).train) == trained);
}

TEST_CASE("tokens: llm.c's token files of both widths give their tokens back") {
    Folder folder;
    FRESH_RANDOM(rng);
    std::vector<uint16_t> narrow(1003);
    std::vector<uint32_t> wide(1003);
    for (auto& t : narrow) t = static_cast<uint16_t>(rng.below(65536));
    for (auto& t : wide) t = static_cast<uint32_t>(rng.below(128256));
    narrow[500] = 65535, wide[500] = 128255;
    for (int version : {1, 7}) {  // llm.c's own files with 4 bytes have version 7
        const Corpus corpus = load_corpus(folder.write("wide.bin", token_file(wide, version)));
        std::vector<int32_t> all = tokens_of(corpus.train);
        CHECK(corpus.validation.size() == 101);
        for (int32_t t : tokens_of(corpus.validation)) all.push_back(t);
        CHECK(all == std::vector<int32_t>(wide.begin(), wide.end()));
        CHECK(corpus.tokens_in_use == 128256);
        CHECK(corpus.vocabulary.empty());
    }
    const std::string train = folder.write("x_train.bin", token_file(narrow)), val = folder.write("x_val.bin", token_file(wide));
    const std::string more = folder.write("other.bin", token_file(std::vector<uint16_t>{1, 2, 3}));
    for (const std::string& data : {train + "," + val, val + "," + train}) {
        const Corpus corpus = load_corpus(data);
        CHECK(tokens_of(corpus.train) == std::vector<int32_t>(narrow.begin(), narrow.end()));
        CHECK(tokens_of(corpus.validation) == std::vector<int32_t>(wide.begin(), wide.end()));
    }
    CHECK(tokens_of(load_corpus(more + "," + val).train) == std::vector<int32_t>{1, 2, 3});
    const Corpus one = load_corpus(val);  // nothing to train on but itself
    CHECK(one.train.size() + one.validation.size() == 1003);
}

TEST_CASE("tokens: data that are missing, empty, truncated, of a wrong magic or not what they say are refused by name") {
    Folder folder;
    const std::string good = token_file(std::vector<uint16_t>(100, 7));
    check_data_refused((folder.path / "missing").string(), "missing");
    check_data_refused(std::string(5000, 'x'), "xxx");
    check_data_refused(",", "--data");
    check_data_refused("/dev/null", "/dev/null");
    check_data_refused(folder.write("empty", ""), "empty");
    check_data_refused(folder.write("empty.bin", ""), "empty.bin");
    check_data_refused(folder.write("zeros", std::string("text\0text", 9)), "zeros");
    folder.write("hollow/binary", std::string(10, '\0'));
    check_data_refused((folder.path / "hollow").string(), "hollow");
    check_data_refused(folder.write("text", "text") + "," + folder.write("good.bin", good), "good.bin");
    for (size_t size = 1; size < good.size(); size += 13) check_data_refused(folder.write("cut.bin", good.substr(0, size)), "cut.bin");
    check_data_refused(folder.write("long.bin", good + "x"), "long.bin");
    struct Lie {
        size_t place;
        int32_t value;
    };
    const Lie lies[] = {{0, 20240521}, {0, 0},  {0, 20240801}, {1, 0},   {1, 2},         {1, 7},
                        {2, 0},        {2, -1}, {2, 99},       {2, 101}, {2, INT32_MAX}, {2, INT32_MIN}};
    for (const Lie& lie : lies) {
        CAPTURE(lie.place);
        CAPTURE(lie.value);
        std::string file = good;
        put(&file, lie.place, lie.value);
        check_data_refused(folder.write("lie.bin", file), "lie.bin");
    }
    check_data_refused(folder.write("negative.bin", token_file(std::vector<uint32_t>{1, 0x80000000u, 2})), "negative.bin");
}

TEST_CASE("tokens: whatever bytes are changed or cut in a token file and its table, it is read or refused") {
    Folder folder;
    FRESH_RANDOM(rng);
    const std::string tokens = token_file(std::vector<uint16_t>{0, 1, 2, 3, 1, 2, 0, 3, 1, 1, 0, 2});
    const std::string pieces = table(R"(["a", "\u00e9", "\n", ""])", "4");
    int64_t read = 0;
    for (int64_t round = count(3000, 600); round > 0; round--) {
        std::string changed[] = {tokens, pieces};
        std::string& file = changed[rng.below(2)];
        const auto reach = rng.below(2) ? 12 : static_cast<int64_t>(file.size());  // half of the time where the meaning is
        for (int64_t changes = rng.below(3); changes >= 0; changes--)
            file[static_cast<size_t>(rng.below(reach))] ^= static_cast<char>(1 << rng.below(8));
        if (rng.below(4) == 0) file.resize(static_cast<size_t>(rng.below(static_cast<int64_t>(file.size()))));
        folder.write("vocabulary.json", changed[1]);
        const std::string path = folder.write("fuzz.bin", changed[0]);
        try {
            const Corpus corpus = load_corpus(path);
            read++;
            for (int32_t t : tokens_of(corpus.train)) CHECK((t >= 0 && t < corpus.tokens_in_use));
            corpus.vocabulary.decode(tokens_of(corpus.validation));
        } catch (const Error&) {  // anything else fails the test
        }
    }
    CHECK(read > 0);  // a change of an unused header word or of one token by another is no damage
}

TEST_CASE("tokens: bytes are their own vocabulary") {
    std::string all;
    std::vector<int32_t> tokens;
    for (int byte = 0; byte < 256; byte++) all += static_cast<char>(byte), tokens.push_back(byte);
    CHECK(Vocabulary::bytes().encode(all) == tokens);
    CHECK(Vocabulary::bytes().decode(tokens) == all);
    CHECK(Vocabulary::bytes().decode({65, 256, -1}) == "A<256><-1>");
    CHECK(Vocabulary::bytes().encode("").empty());
}

TEST_CASE("tokens: a vocabulary's table carries the bytes of every piece") {
    Folder folder;
    const std::string pieces = R"(["a", "ab", "b", "", "\u0000", "\u00c3\u00a9", "\u00ff\"\\", "abc", "b"])";
    const Vocabulary v = Vocabulary::read(folder.write("vocabulary.json", table(pieces, "9")));
    CHECK(v.size() == 9);
    CHECK(v.decode({1, 3, 5, 9}) == "ab<3>\xC3\xA9<9>");
    CHECK(v.decode({4, 6}) == std::string("\0\xFF\"\\", 4));
    CHECK(v.encode("ababcb\xC3\xA9") == std::vector<int32_t>{1, 7, 8, 5});  // the longest piece; of equal ones the last
    check_refused([&] { v.encode("ax"); }, "--prompt");

    const std::string path = folder.write("x.bin", token_file(std::vector<uint16_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 0}));
    CHECK(load_corpus(path).vocabulary.size() == 9);
    CHECK(load_corpus(path).tokens_in_use == 9);
    folder.write("vocabulary.json", table(R"(["a", "b"])", "2"));
    check_data_refused(path, "8");  // a token that the table has not
}

TEST_CASE("tokens: a damaged table is refused by name") {
    Folder folder;
    const std::string whole = table(R"(["a", "b"])", "2");
    for (size_t size = 0; size < whole.size(); size++)
        check_refused([&] { Vocabulary::read(folder.write("t.json", whole.substr(0, size))); }, "t.json");
    const std::vector<std::string> damaged = {
        table(R"(["a", "b"])", "3"),
        table(R"(["a", 1])", "2"),
        table("[]", "0"),
        table("{}", "0"),
        table(R"(["\u0100"])", "1"),
        table(R"(["\u20ac"])", "1"),
        table(R"(["a"])", R"("1")"),
        "[]",
        "null",
        "{}",
        R"({"format": "coat vocabulary", "version": 2, "size": 1, "pieces": ["a"]})",
        R"({"format": 1, "version": 1, "size": 1, "pieces": ["a"]})",
        std::string(100000, '['),
    };
    for (const std::string& bad : damaged) {
        INFO(bad.substr(0, 100));
        check_refused([&] { Vocabulary::read(folder.write("t.json", bad)); }, "t.json");
    }
}

TEST_CASE("tokens: each epoch hands out every window once, in another order for each epoch and seed") {
    FRESH_RANDOM(rng);
    std::vector<int64_t> sizes(70);
    std::iota(sizes.begin(), sizes.end(), 1);
    for (int64_t n : {255, 256, 257, 1023, 1024, 1025, 4097, 70001}) sizes.push_back(n);
    for (int64_t n : sizes) {
        const uint64_t seed = rng.bits();
        Loader loader(counting(n + 1), 1, 1, seed, true), other(counting(n + 1), 1, 1, seed + 1, true);
        REQUIRE(loader.windows() == n);
        const std::vector<int32_t> first = windows_of_epoch(loader), second = windows_of_epoch(loader), third = windows_of_epoch(other);
        CHECK((is_permutation_of_all(first) && is_permutation_of_all(second) && is_permutation_of_all(third)));
        CHECK((loader.position().epoch == 2 && loader.position().window == 0));
        if (n < 20) continue;  // of 20! orders no two are likely the same
        CHECK((first != second && first != third && !std::is_sorted(first.begin(), first.end())));
    }
    Loader in_order(counting(1000), 1, 1, 3, false);
    const std::vector<int32_t> order = windows_of_epoch(in_order);
    CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("tokens: every window is as likely as another to come at any place") {
    FRESH_RANDOM(rng);
    constexpr int64_t N = 7, EPOCHS = 7000;  // each window at each place: mean 1000, standard deviation 29.3
    Loader loader(counting(N + 1), 1, 1, rng.bits(), true);
    int64_t seen[N][N] = {};
    for (int64_t epoch = 0; epoch < EPOCHS; epoch++) {
        const std::vector<int32_t> order = windows_of_epoch(loader);
        for (size_t place = 0; place < N; place++) seen[place][order[place]]++;
    }
    for (const auto& place : seen)
        for (int64_t times : place) CHECK(std::abs(times - EPOCHS / N) < 6 * 29.3);  // beyond 6 sigma in one of 10^7 runs
}

TEST_CASE("tokens: batches span epochs, their windows overlap by one token, and a position resumes exactly") {
    FRESH_RANDOM(rng);
    constexpr int64_t B = 3, T = 4, WINDOWS = 7;
    const TokenStream stream = counting(WINDOWS * T + 3);  // two tokens too few for another window
    const uint64_t seed = rng.bits();
    Loader loader(stream, B, T, seed, true);
    REQUIRE(loader.windows() == WINDOWS);
    std::vector<Loader::Position> positions;
    std::vector<std::vector<int32_t>> batches;
    std::map<int32_t, int> times;
    for (int64_t batch = 0; batch < 2 * WINDOWS; batch++) {  // six epochs
        std::vector<int32_t> tokens(B * T), targets(B * T);
        positions.push_back(loader.position());
        loader.next(tokens.data(), targets.data());
        for (size_t b = 0; b < B; b++) {
            CHECK(tokens[b * T] % T == 0);
            times[tokens[b * T]]++;
            for (size_t t = 0; t < T; t++) {
                CHECK(tokens[b * T + t] == tokens[b * T] + static_cast<int32_t>(t));
                CHECK(targets[b * T + t] == tokens[b * T + t] + 1);
            }
        }
        batches.push_back(tokens);
    }
    CHECK(times.size() == WINDOWS);
    for (const auto& [window, n] : times) CHECK(n == 6);
    for (size_t from = 0; from < positions.size(); from++) {
        Loader resumed(stream, B, T, seed, true);
        resumed.seek(positions[from]);
        for (size_t batch = from; batch < batches.size(); batch++) {
            std::vector<int32_t> tokens(B * T), targets(B * T);
            resumed.next(tokens.data(), targets.data());
            CHECK(tokens == batches[batch]);
        }
    }
}

TEST_CASE("tokens: fewer tokens than one batch, and a position that the data have not, are refused") {
    CHECK_NOTHROW(Loader(counting(4 * 8 + 1), 4, 8, 1, true));
    for (int64_t n : {0, 1, 2, 8, 9, 32}) check_refused([&] { Loader(counting(n), 4, 8, 1, true); }, "--batch");
    check_refused([] { Loader(TokenStream(), 1, 1, 1, true); }, "--batch");
    Loader loader(counting(101), 1, 10, 1, true);
    loader.seek({5, 9});
    for (const Loader::Position& p : {Loader::Position{0, 10}, Loader::Position{0, -1}, Loader::Position{-1, 0}})
        check_refused([&] { loader.seek(p); }, "--data");
}
