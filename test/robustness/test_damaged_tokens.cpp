// test_damaged_tokens.cpp - token files and vocabulary tables that are missing, damaged, or changed at random: each is
// read or is an error.
#include <doctest/doctest.h>

#include "../../coat.h"
#include "../../data/tokens.h"
#include "../random.h"
#include "../token_files.h"

using namespace coat;
using coat::test::count;
using namespace coat::test::token_files;

namespace {

void put(std::string* file, size_t index, int32_t value) { file->replace(index * 4, 4, reinterpret_cast<const char*>(&value), 4); }

}  // namespace

TEST_CASE("load_corpus: data that are missing, empty, truncated or wrong are rejected by name") {
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

TEST_CASE("Loader: tokens that were overwritten by larger ones are an error that names the file") {
    Folder folder;
    for (const auto& [before, after] : {std::pair{uint16_t{7}, uint16_t{8}}, {uint16_t{7}, uint16_t{65535}}}) {
        const std::string path = folder.write("in-use.bin", token_file(std::vector<uint16_t>(100, before)));
        Loader loader(load_corpus(path).train, 1, 8, 1, true);
        int32_t tokens[8], targets[8];
        loader.next(tokens, targets);
        folder.write("in-use.bin", token_file(std::vector<uint16_t>(100, after)));
        check_refused([&] { loader.next(tokens, targets); }, "in-use.bin");
    }
}

TEST_CASE("load_corpus: a token file and vocabulary with random changes or cuts are read or rejected") {
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

TEST_CASE("vocabulary: a damaged table is rejected by name") {
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
