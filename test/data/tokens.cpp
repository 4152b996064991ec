// tokens.cpp - data/tokens.cpp: corpora and their split, token files, what counts, and the Loader's order.
#include <doctest/doctest.h>

#include <map>
#include <numeric>
#include <set>
#include <sys/resource.h>

#include "../../common/model.h"
#include "../help/checkpoints.h"
#include "../help/program.h"

using namespace coat;
using namespace coat::test;

using Shorts = std::vector<uint16_t>;
using Words = std::vector<uint32_t>;

static std::string text_of(const Corpus& c) { return c.vocabulary.decode(tokens_of(c.train)); }
static std::string held_out(const Corpus& c) { return c.vocabulary.decode(tokens_of(c.validation)); }
static Words counting(size_t n, uint32_t first = 0) {
    Words tokens(n);
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}
// The windows of a loader of counting() with B = T = 1, from number `first` on.
static Tokens windows_of(const Loader& loader, int64_t first, int64_t count) {
    Tokens order;
    for (int64_t i = first; i < first + count; i++) {
        int32_t token, target;
        loader.read(i, &token, &target);
        CHECK(target == token + 1);
        order.push_back(token);
    }
    return order;
}

TEST_CASE("TokenStream: joined and cut streams of several widths give the tokens in order") {
    SEEDED_RANDOM(rng);
    for (int round = 0; round < 50; round++) {
        TokenStream stream;
        Tokens all, counted;
        for (int64_t piece = rng.below(16); piece > 0; piece--) {
            Words words(size_t(rng.below(9)));
            for (uint32_t& x : words) x = uint32_t(rng.bits());
            const int64_t width = rng.below(3);
            stream.append(width == 0   ? stream_of(std::vector<uint8_t>(words.begin(), words.end()))
                          : width == 1 ? stream_of(Shorts(words.begin(), words.end()))
                                       : stream_of(words));
            for (const uint32_t x : words) {
                all.push_back(int32_t(x & (width == 0 ? 0xFF : width == 1 ? 0xFFFF : 0x7FFFFFFF)));
                counted.push_back(width == 2 && x >> 31 ? NO_TARGET : all.back());
            }
        }
        REQUIRE(stream.size() == int64_t(all.size()));
        const int64_t first = rng.below(stream.size() + 1), n = rng.below(stream.size() - first + 1);
        Tokens tokens(n), targets(n);
        stream.read(first, n, tokens.data(), targets.data());
        CHECK(tokens == Tokens(all.begin() + first, all.begin() + first + n));
        CHECK(targets == Tokens(counted.begin() + first, counted.begin() + first + n));
        const TokenStream end = stream.take_end(n);
        CHECK(tokens_of(stream) == Tokens(all.begin(), all.end() - n));
        CHECK(tokens_of(end) == Tokens(all.end() - n, all.end()));
    }
}

TEST_CASE("TokenStream: the hash depends on tokens and their order and what counts but not on the files") {
    SEEDED_RANDOM(rng);
    constexpr int64_t N = 600'001;  // three parts of the hash; half a word at the end
    Words tokens(N);
    for (uint32_t& t : tokens) t = uint32_t(rng.below(50'000));
    TokenStream whole = stream_of(tokens);
    const uint64_t hash = whole.scan().hash;
    TokenStream begin = whole, joined;
    const TokenStream end = begin.take_end(rng.below(N));
    joined.append(begin);
    joined.append(end);
    CHECK(joined.scan().hash == hash);
    for (const int64_t at : {int64_t(0), int64_t(4096), rng.below(N), N / 2, N - 1})
        for (const uint32_t change : {1u, 1u << 31}) {
            Words other = tokens;
            other[at] ^= change;
            CHECK(stream_of(other).scan().hash != hash);
        }
    Words swapped = tokens, parts = tokens, shorter(tokens.begin(), tokens.end() - 1), longer = tokens;
    std::iter_swap(swapped.begin(),
                   std::find_if(swapped.begin(), swapped.end(), [&](uint32_t t) { return t != tokens[0]; }));
    std::rotate(parts.begin(), parts.begin() + (1 << 18), parts.begin() + (2 << 18));  // two whole parts
    longer.push_back(0);
    for (const Words& other : {swapped, parts, shorter, longer}) CHECK(stream_of(other).scan().hash != hash);
    for (const int64_t at : {int64_t(0), N - 1}) {
        Words other = tokens;
        other[at] = 50'001 | 1u << 31;
        CHECK(stream_of(other).scan().largest == 50'001);
    }
    CHECK(TokenStream().scan().largest == -1);
    // A file that is changed meanwhile may have any token.
    Folder folder;
    const std::string path = folder.write("x.bin", token_file(Shorts(100, 7)));
    Corpus corpus = load_corpus(path);
    CHECK(corpus.train_summary.largest == 7);
    CHECK(tokens_of(corpus.train) == Tokens(90, 7));
    std::fstream(path, std::ios::in | std::ios::out | std::ios::binary).seekp(1024 + 89 * 2) << '\x08';
    check_error([&] { tokens_of(corpus.train); }, "--data was changed", "token 8");
}

TEST_CASE("load_corpus: of files the last tenth is held out; of a folder every 20th; none is read twice") {
    Folder folder;
    const std::string a(1234, 'a'), b = "\xC3\xA9t\xC3\xA9 in UTF-8\r\n", file = folder.write("a.txt", a);
    for (const auto& [data, all] : {std::pair{file, a}, {file + "," + folder.write("b", b), a + b}}) {
        const Corpus corpus = load_corpus(data);
        CHECK(text_of(corpus) + held_out(corpus) == all);
        CHECK(corpus.validation.size() == int64_t(all.size() + 9) / 10);
        CHECK(corpus.seq == 0);
        CHECK(corpus.vocabulary.decode({65, 10, 255, 256, -1}) == "A\n\xFF<256><-1>");
    }
    std::map<std::string, std::string> files;  // sorted by bytes, as the corpus must be in any locale
    for (int i = 0; i < 61; i++) {
        const std::string name = concat(i % 3 ? "sub/" : "", i % 2 ? "Z" : "a", i);
        folder.write("in/" + name, files[name] = concat("This is text number ", i, ".\n"));
    }
    folder.write("in/z/copy", "This is text number 7.\n");
    folder.write("in/empty", "");
    folder.write("in/.git/config", "hidden");
    folder.write("in/.hidden", "hidden");
    folder.write("in/binary", std::string("text\0", 5));
    for (const auto& [to, name] : {std::pair{"a0", "in/link"}, {"none", "in/none"}, {"itself", "in/itself"}})
        fs::create_symlink(to, folder / name);
    fs::create_directory_symlink("..", folder / "in/loop");
    std::string expected[2];  // to train on, held out
    int index = 0;
    for (const auto& [name, text] : files) expected[index++ % 20 == 10] += text;
    for (const char* spelled : {"in", "in/"}) {
        const Corpus corpus = load_corpus(folder / spelled);
        CHECK(text_of(corpus) == expected[0]);
        CHECK(held_out(corpus) == expected[1]);
    }
}

TEST_CASE("load_corpus: what --val names is held out and all other data are trained on") {
    Folder folder;
    std::string all;
    for (int i = 10; i < 40; i++) {
        const std::string text = concat("This is text number ", i, ".\n");
        folder.write(concat("in/", i), text);
        if (i != 25) all += text;
    }
    folder.write("in/copy", "This is text number 25.\n");
    for (const std::string& data : {folder / "in", folder / "in/25" + "," + folder / "in"}) {
        const Corpus corpus = load_corpus(data, {.val = folder / "in/25"});
        CHECK(text_of(corpus) == all);
        CHECK(held_out(corpus) == "This is text number 25.\n");
        CHECK(corpus.held_out_rule == "--val " + folder / "in/25");
        REQUIRE(corpus.left_out.size() == 1);  // else its text would be trained on
        CHECK(corpus.left_out[0].path == folder / "in/copy");
        CHECK(corpus.files.size() == 30);
        CHECK(corpus.files[0].path == folder / "in/25");
    }
    const Corpus nothing = load_corpus(folder / "in/25", {.val = folder / "in"});
    CHECK(nothing.train.size() == 0);
    CHECK(nothing.validation.size() == 30 * 24);

    const std::string train = folder.write("tokens/train.bin", token_file(Shorts{1, 2, 3})),
                      val = folder.write("tokens/val.bin", token_file(Shorts{4, 5})),
                      other = folder.write("tokens/other.bin", token_file(Shorts{6}));
    const Corpus corpus = load_corpus(folder / "tokens", {.val = other});
    CHECK(tokens_of(corpus.train) == Tokens{1, 2, 3, 4, 5});
    CHECK(tokens_of(corpus.validation) == Tokens{6});
    CHECK(tokens_of(load_corpus(train, {.val = other + "," + val}).validation) == Tokens{6, 4, 5});
    constexpr int32_t T = 7;
    const std::string packed = folder.write("packed.bin", token_file(counting(3 * T + 1), T)),
                      more = folder.write("more.bin", token_file(counting(2 * T + 1), T));
    const Corpus windows = load_corpus(packed, {.val = more});
    CHECK(windows.train.size() == 3 * T + 1);
    CHECK(windows.validation.size() == 2 * T + 1);
    CHECK(windows.seq == T);

    folder.write("empty", "");
    for (const auto& [data, held, who] :
         {std::tuple{folder / "in", folder / "missing", std::string("missing")},
          {folder / "in", folder / "empty", "--val " + folder / "empty"},
          {folder / "in", other, "not a whole token file"},
          {other, folder / "in/25", "not a whole token file"},
          {train, more, "windows"}})
        check_error([&, all = data, val = held] { load_corpus(all, {.val = val}); }, who);
    const std::string records = folder.write("chats.jsonl", "{}");
    check_error([&] { load_corpus(folder / "in", {.val = records}); }, "--val " + records, "has records");
}

TEST_CASE("load_corpus: what is no text is left out and named; so is what a run that goes on did not know") {
    Folder folder;
    folder.write("in/a", "first "), folder.write("in/b", std::string("x\0y", 3)),
        folder.write("in/c", "caf\xE9");
    folder.write("in/d", "first ");
    folder.write("in/e", "\xEF\xBB\xBFsecond");
    folder.write("in/empty", "");
    folder.write("in/f", "\xFF\xFEt\x01");
    const Corpus corpus = load_corpus(folder / "in");
    CHECK(text_of(corpus) + held_out(corpus) == "first second");
    CHECK(corpus.tokens_are_bytes);
    std::string named;
    for (const LeftOut& file : corpus.left_out) named += fs::path(file.path).filename().string();
    CHECK(named == "bcfd");  // copies come last
    CHECK(contains(corpus.left_out.back().reason, "has the same text as " + folder / "in/a"));
    REQUIRE(corpus.files.size() == 2);
    CHECK(corpus.files[1].path == folder / "in/e");
    CHECK(corpus.files[1].bytes == 9);
    check_error([&] { load_corpus(folder / "in/b"); }, folder / "in/b", "has a NUL byte");
    check_error([&] { load_corpus(folder / "in/f"); }, folder / "in/f", "is UTF-16");
    folder.write("in/0", "new");
    folder.write("in/z", "new, too");
    const Corpus again = load_corpus(folder / "in", {.files_of_resumed_run = corpus.files});
    CHECK(text_of(again) + held_out(again) == "first second");
    CHECK(again.left_out[0].path == folder / "in/0");
    CHECK(contains(again.left_out[0].reason, "is new"));
    for (const LeftOut& file : again.left_out)  // the run never had the copy, so it is not new
        if (file.path == folder / "in/d") CHECK(contains(file.reason, "has the same text as "));
    for (const char* name : {"a", "b"})
        folder.write(concat("tokens/", name, ".bin"), token_file(counting(100)));
    const Corpus tokens = load_corpus(folder / "tokens");
    folder.write("tokens/c.bin", token_file(counting(100)));
    const Corpus resumed = load_corpus(folder / "tokens", {.files_of_resumed_run = tokens.files});
    CHECK(resumed.train.size() + resumed.validation.size() == 200);
    CHECK(resumed.left_out.size() == 1);
}

TEST_CASE("load_corpus: text that is not copied into memory is the same text; a file of it may be replaced") {
    Folder folder;
    std::vector<std::string> paths;
    for (int i = 0; i < 30; i++)
        paths.push_back(
            folder.write(concat("in/", i), concat(i % 7 ? "" : "\xEF\xBB\xBF", "This is text ", i, "\n")));
    Corpus copied = load_corpus(folder / "in"), part = load_corpus(folder / "in", {.copied_bytes = 100}),
           mapped = load_corpus(folder / "in", {.copied_bytes = 0});
    for (Corpus* other : {&part, &mapped}) {
        CHECK(text_of(*other) == text_of(copied));
        CHECK(held_out(*other) == held_out(copied));
        CHECK(other->train_summary.hash == copied.train_summary.hash);
    }
    const std::string text = text_of(copied);
    write_file(folder / "new", "short");
    fs::rename(folder / "new", paths[0]);  // as editors save
    fs::remove(paths[1]);
    CHECK(text_of(copied) == text);
    CHECK(text_of(mapped) == text);
    std::ofstream(paths[2], std::ios::trunc) << "short";
    CHECK(text_of(copied) == text);
    check_error([&] { text_of(mapped); }, paths[2], "became shorter");
}

TEST_CASE("MappedFile::copy: an error of the system is reported as what it is") {
    Folder folder;
    const std::string path = folder.write("text", "12345678");
    const MappedFile file(path);
    // The system cannot write to address 0, so the read fails although the file has all bytes.
    check_error([&] { file.copy(file.data(), file.bytes(), nullptr); }, path, "Bad address");
}

TEST_CASE("load_corpus: thousands of files take no descriptors and reading them takes no long search") {
    Folder folder;
    std::string all;
    for (int i = 0; i < 3000; i++) {
        const Shorts tokens = {uint16_t(i), uint16_t(i / 2), 7};
        folder.write(concat("in/", 10000 + i, ".bin"), token_file(tokens));
        for (uint16_t t : tokens) all += concat(t, " ");
    }
    rlimit before{};
    getrlimit(RLIMIT_NOFILE, &before);
    // On a machine with GPUs, CUDA keeps descriptors open. The limit leaves 35 besides those that are in use.
    const auto in_use = fs::directory_iterator("/proc/self/fd");
    const rlimit tight{rlim_t(std::distance(begin(in_use), end(in_use))) + 35, before.rlim_max};
    setrlimit(RLIMIT_NOFILE, &tight);
    Corpus corpus;
    const std::string error = error_of([&] { corpus = load_corpus(folder / "in"); });
    setrlimit(RLIMIT_NOFILE, &before);
    REQUIRE(error == "");
    std::string found;
    for (const TokenStream* stream : {&corpus.train, &corpus.validation})
        for (int32_t t : tokens_of(*stream)) found += concat(t, " ");
    CHECK((found == all));
}

TEST_CASE("load_corpus: llm.c's token files of both widths are read back and names say what is held out") {
    Folder folder;
    SEEDED_RANDOM(rng);
    Shorts narrow(1003);
    Words wide(1003);
    for (auto& t : narrow) t = uint16_t(rng.below(65536));
    for (auto& t : wide) t = uint32_t(rng.below(128256));
    const Tokens narrow_tokens(narrow.begin(), narrow.end()), wide_tokens(wide.begin(), wide.end());
    const std::string train = folder.write("train_with_val.bin", token_file(narrow)),
                      val = folder.write("x_val.bin", token_file(wide)),
                      more = folder.write("other.bin", token_file(Shorts{1, 2, 3}));
    for (const std::string& data : {train + "," + val, val + "," + train, val + "," + train + "," + val}) {
        const Corpus corpus = load_corpus(data);
        CHECK(tokens_of(corpus.train) == narrow_tokens);
        CHECK(tokens_of(corpus.validation) == wide_tokens);
    }
    CHECK(tokens_of(load_corpus(more + "," + val).train) == Tokens{1, 2, 3});
    // The only file is split; named twice, it is read once. llm.c's files of 4-byte tokens have version 7.
    const std::string seven = folder.write("wide.bin", token_file(wide, 0, 7));
    for (const std::string& data : {val, val + "," + val, seven}) {
        Corpus one = load_corpus(data);
        CHECK(one.validation.size() == 101);
        CHECK(one.vocabulary.pieces.empty());
        one.train.append(one.validation);
        CHECK(tokens_of(one.train) == wide_tokens);
    }
}

TEST_CASE(
    "load_corpus: a token file is held out if val or validation is a word of its name and train is none") {
    Folder folder;
    const std::string other = folder.write("other.bin", token_file(Shorts{1, 2, 3}));
    for (const auto& [name, held_out] : {std::pair{"val.bin", true},
                                         {"fineweb_val_000000.bin", true},
                                         {"code-validation-2.bin", true},
                                         {"val2.bin", true},
                                         {"constraint_val.bin", true},
                                         {"medieval.bin", false},
                                         {"evaluation.bin", false},
                                         {"values_1.bin", false},
                                         {"interval-7.bin", false},
                                         {"train_without_val.bin", false},
                                         {"val_training.bin", false}}) {
        INFO(std::string(name));
        const Corpus corpus = load_corpus(other + "," + folder.write(name, token_file(Shorts{7, 7, 7, 7})));
        CHECK(corpus.validation.size() == (held_out ? 4 : 1));  // else the last tenth of 7 tokens
    }
}

TEST_CASE("load_corpus: windows of packed files stay windows in several files and where one is cut") {
    Folder folder;
    constexpr int32_t T = 7;
    const std::string a = folder.write("a.bin", token_file(counting(8 * T + 1, 1000), T)),
                      b = folder.write("b.bin", token_file(counting(11 * T + 1, 2000), T)),
                      val = folder.write("val.bin", token_file(counting(2 * T + 1, 3000), T)),
                      other = folder.write("other.bin", token_file(counting(41), T + 1)),
                      text = folder.write("text.bin", token_file(counting(41)));
    for (const auto& [data, windows] : {std::pair{a + "," + b + "," + val, 19}, {a + "," + b, 16}}) {
        const Corpus c = load_corpus(data);
        CHECK(c.seq == T);
        for (const auto& [stream, n] : {std::pair{&c.train, windows}, {&c.validation, 2}}) {
            const Loader loader(*stream, 1, T, 1);
            CHECK(loader.windows() == n);
            for (int64_t i = 0; i < loader.windows(); i++) {
                int32_t tokens[T], targets[T];
                loader.read(i, tokens, targets);
                CHECK(tokens[0] % 1000 % T == 0);
                CHECK(tokens[T - 1] == tokens[0] + T - 1);
            }
        }
    }
    for (const std::string& data : {a + "," + other, text + "," + a, a + "," + text})
        check_error([&] { load_corpus(data); }, "windows");
}

TEST_CASE("load_corpus: tokenizer.bin beside token files turns tokens into text; all folders have one") {
    Folder folder;
    const std::string longest(255, 'x'), tokens = token_file(Shorts{0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1});
    const std::vector<std::string> pieces = {"a", std::string("\0\xFF", 2), "", longest};
    const std::string a = folder.write("a/x.bin", tokens), b = folder.write("b/x.bin", tokens),
                      c = folder.write("c/x.bin", tokens), file = tokenizer_file(pieces);
    folder.write("a/tokenizer.bin", file);
    folder.write("b/tokenizer.bin", file);
    for (const std::string& data :
         {a, a + "," + c, c + "," + a, a + "," + b, folder / "a", folder.path.string()}) {
        const Corpus corpus = load_corpus(data);
        CHECK(corpus.vocabulary.pieces == pieces);
        CHECK(corpus.vocabulary.decode({0, 3, 1, 2, 4, -1}) ==
              "a" + longest + std::string("\0\xFF", 2) + "<2><4><-1>");
    }
    CHECK(load_corpus(c).vocabulary.pieces.empty());
    folder.write("b/tokenizer.bin", tokenizer_file({"a", "b", "", longest}));
    for (const std::string& data : {a + "," + b, b + "," + a, a + "," + c + "," + b})
        check_error([&] { load_corpus(data); }, "/tokenizer.bin", "with one tokenizer");
    std::vector<std::string> all = {file + "x", file_header({20240328, 1, 0}), file_header({20240520, 1, 4})};
    for (size_t size = 0; size < file.size(); size += 7) all.push_back(file.substr(0, size));
    for (const std::string& bad : all) {
        folder.write("a/tokenizer.bin", bad);
        check_error([&] { load_corpus(a); }, "a/tokenizer.bin");
    }
}

TEST_CASE("load_corpus: missing or empty or truncated or wrong data are rejected by name") {
    Folder folder;
    const std::string good = token_file(Shorts(100, 7)), wide = token_file(Words(100, 7));
    std::vector<std::pair<std::string, std::string>> rows = {
        {"empty", ""}, {"long.bin", good + "x"}, {"zeros", std::string("text\0text", 9)}};
    for (size_t size = 0; size < good.size(); size += 13) rows.push_back({"cut.bin", good.substr(0, size)});
    auto with_word = [&](std::string file, size_t index, int32_t value) {
        rows.push_back({"word.bin", file.replace(index * 4, 4, reinterpret_cast<const char*>(&value), 4)});
    };
    for (const auto& [word, values] :  // of the header: magic, version, number of tokens, --seq
         {std::pair{0, Tokens{0, 20240521, 20240801, 20240328}},
          {1, {0, 2, 7}},
          {2, {0, -1, 99, 101, INT32_MAX, INT32_MIN}},
          {3, {-1, INT32_MIN}}})
        for (const int32_t value : values) with_word(good, word, value);
    for (const int32_t version : {0, 2, 8}) with_word(wide, 1, version);
    for (const auto& [name, bytes] : rows) {
        CAPTURE(name);
        const std::string path = folder.write(name, bytes);
        check_error([&] { load_corpus(path); }, path);
    }
    folder.write("hollow/binary", std::string(10, '\0'));
    for (const char* name : {"chats.jsonl", "chats.json", "chats.parquet"}) {
        const std::string records = folder.write(name, "{\"text\": \"abc\"}\n");
        check_error([&] { load_corpus(records); }, "--out tokens " + records);
    }
    folder.write("project/package.json", "{}");
    folder.write("project/text", std::string(30, 'x'));
    folder.write("project/out/model.safetensors", "");
    folder.write("project/out/config.json", "a model's");
    CHECK(load_corpus(folder / "project").train.size() == 28);  // in a folder it is a text among others
    const std::string text = folder.write("text", "text"), tokens = folder.write("good.bin", good);
    for (const auto& [data, who] : {std::pair{folder / "missing", "missing"},
                                    {"/dev/null", "/dev/null"},
                                    {folder / "hollow", "hollow"},
                                    {text + "," + tokens, "text"},
                                    {tokens + "," + text, "text"}})
        check_error([&, all = data] { load_corpus(all); }, who);
}

TEST_CASE("load_corpus: token and tokenizer files with random changes or cuts are read or rejected") {
    Folder folder;
    const std::string tokens = folder.write("x.bin", token_file(Words{0, 1, 2, 3, 1, 2, 0, 3, 1, 1, 0, 2})),
                      pieces = folder.write("tokenizer.bin", tokenizer_file({"a", "\xC3\xA9", "\n", ""}));
    for (const auto& [file, end] : {std::pair{tokens, 16}, {tokens, 1072}, {pieces, 16}, {pieces, 1032}})
        check_random_damage(file, size_t(end), cases(800, 150), [&, path = tokens] {
            const Corpus corpus = load_corpus(path);
            for (int32_t t : tokens_of(corpus.train)) CHECK(t >= 0);
            corpus.vocabulary.decode(tokens_of(corpus.validation));
        });
}

TEST_CASE("Loader: each epoch gives every window once in an order by epoch and seed that never changes") {
    SEEDED_RANDOM(rng);
    std::vector<int64_t> sizes = {255, 256, 257, 1023, 1024, 1025, 4097, 70001};
    for (int64_t n = 1; n <= 70; n++) sizes.push_back(n);
    for (int64_t n : sizes) {
        const uint64_t seed = rng.bits();
        const Loader loader(stream_of(counting(n + 1)), 1, 1, seed),
            other(stream_of(counting(n + 1)), 1, 1, seed + 1);
        REQUIRE(loader.windows() == n);
        Tokens every(n);
        std::iota(every.begin(), every.end(), 0);
        std::set<Tokens> orders = {every};
        for (Tokens order : {windows_of(loader, 0, n), windows_of(loader, n, n), windows_of(other, 0, n)}) {
            orders.insert(order);
            std::sort(order.begin(), order.end());
            CHECK((order == every));
        }
        CHECK((n < 20 || orders.size() == 4));  // two equal orders are unlikely: there are 20!
    }
    // The order of seed 1 is that of every earlier version, so that old runs stay comparable.
    const Loader loader(stream_of(counting(1001)), 1, 1, 1);
    CHECK(windows_of(loader, 0, 8) == Tokens{596, 471, 836, 871, 478, 283, 911, 561});
    CHECK(windows_of(loader, 1000, 4) == Tokens{648, 897, 104, 183});
}

TEST_CASE("Loader: batches span epochs; windows overlap by one token and targets say what counts") {
    SEEDED_RANDOM(rng);
    constexpr int64_t B = 3, T = 4, WINDOWS = 7;
    Words words = counting(WINDOWS * T + 3);  // two tokens short of another window
    for (uint32_t& t : words) t |= uint32_t(rng.below(2)) << 31;
    const Loader loader(stream_of(words), B, T, rng.bits());
    REQUIRE(loader.windows() == WINDOWS);
    std::map<int32_t, int> times;
    for (int64_t batch = 0; batch < 2 * WINDOWS; batch++) {  // six epochs
        Tokens tokens(B * T), targets(B * T);
        loader.read(batch, tokens.data(), targets.data());
        for (size_t i = 0; i < B * T; i++) {
            CHECK(tokens[i] == tokens[i / T * T] + int32_t(i % T));
            const uint32_t next = words[tokens[i] + 1];
            CHECK(targets[i] == (next >> 31 ? NO_TARGET : int32_t(next)));
        }
        for (size_t b = 0; b < B; b++) times[tokens[b * T]]++;
    }
    for (int32_t window = 0; window < WINDOWS; window++) CHECK(times[window * T] == 6);
    CHECK_NOTHROW(Loader(stream_of(counting(4 * 8 + 1)), 4, 8, 1));
    for (int64_t n : {0, 1, 2, 8, 9, 32})
        check_error([&] { Loader(stream_of(counting(n)), 4, 8, 1); }, "--batch");
}

// A limit on the addresses of a process stands for a machine with little memory.
TEST_CASE("train: the start says what the tokens are and what is held out") {
    RunFolder folder;
    folder.write("tokens.bin", token_file(counting(3000)));
    fs::create_directory(folder.path / "texts");
    for (int i = 0; i < 20; i++)
        folder.write(concat("texts/", i), concat("text ", i, std::string(1000, 'x')));
    folder.write("val.bin", token_file(counting(1000)));
    for (const auto& [flags, bytes, held_out] :
         {std::tuple{"--data text",
                     "\ntokens: the bytes of the text; data/tokenize.py makes others "
                     "(--tokenizer gpt2, or --train-bpe 4096)\n",
                     "the last tenth"},
          {"--data texts", "\ntokens: the bytes of the text; ", "every 20th file"},
          {"--data text --model gpt2-tiny", "\ntokens: the bytes of the text; ", "the last tenth"},
          {"--data tokens.bin", "", "the last tenth"},
          {"--data tokens.bin,val.bin", "", "files with the word val in their names"}}) {
        INFO(std::string(flags));
        const Ended ended = train(folder, TINY + "--model llama-tiny --steps 0 " + flags);
        require_success(ended);
        CHECK(contains(ended.out, concat(" held out: ", held_out, "\n")));
        CHECK(contains(ended.out, "\ntokens: ") == (*bytes != 0));
        CHECK(contains(ended.out, bytes));
    }
    CHECK(contains(train(folder, "--plan --device cpu --model llama-2-7b --data text").out,
                   "\ntokens: the bytes of the text, 256 of the vocabulary's 32000; data/tokenize.py"));
}

// AddressSanitizer reserves more addresses than any limit here leaves.
#ifdef __SANITIZE_ADDRESS__
static const bool NO_MEMORY_LIMIT = true;
#else
static const bool NO_MEMORY_LIMIT = false;
#endif
TEST_CASE("train: text that does not fit into memory is an error that speaks of the data" *
          doctest::skip(NO_MEMORY_LIMIT)) {
    RunFolder folder;
    folder.write("large", "");  // The limit has room for the libraries of CUDA, but not for this text.
    fs::resize_file(folder / "large", int64_t{1} << 35);  // the disk stores nothing of it
    const std::string flags = TINY + "--steps 1 --out ''";
    for (const std::string data : {"large", "text,large"}) {
        const Ended ended = shell(folder, "ulimit -v 16000000; train" + flags + " --data " + data);
        check_one_sentence(ended, "--data " + data + " does not fit into memory; turn it into token files");
        CHECK(!contains(ended.error, "--batch"));
    }
    require_success(shell(folder, "ulimit -v 16000000; train" + flags));
}

TEST_CASE("train: a tokenizer beside the token files goes into checkpoints unless the model has one") {
    RunFolder folder;
    const std::string text = read_file(folder / "text");
    folder.write("tokens/train.bin", token_file(Shorts(text.begin(), text.end())));
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tekken.json"})
        folder.write(concat("tokens/", name), concat("of the data: ", name));
    folder.write("tokens/config.json", "not a model's"),
        folder.write("tokens/notes.txt", "not a tokenizer's");
    fs::copy(small_model(), folder.path / "model");
    folder.write("model/tokenizer.model", "of the model");
    const std::string flags = TINY + "--data tokens --steps 1 --warmup 0 ";
    require_success(train(folder, flags + "--out a"));
    require_success(train(folder, "--device cpu --resume a --steps 2 --out b"));
    require_success(train(folder, flags + "--model model --out c"));
    const std::set<std::string> own = {"config.json", "model.safetensors", "optimizer.state", "trainer.json"};
    for (const auto& [checkpoint, expected] :
         {std::pair<std::string, std::set<std::string>>{
              "a/step-000001",
              {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tekken.json"}},
          {"b/step-000002",
           {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tekken.json"}},
          {"c/step-000001", {"tokenizer.model"}}}) {
        CAPTURE(checkpoint);
        std::set<std::string> names;
        for (const auto& [name, bytes] : files_below(folder / checkpoint))
            if (!own.count(name)) names.insert(name);
        CHECK(names == expected);
    }
    CHECK(read_file(folder / "b/step-000002/tokenizer.json") == "of the data: tokenizer.json");
}
