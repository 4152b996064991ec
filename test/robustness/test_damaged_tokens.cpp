// test_damaged_tokens.cpp - token files and vocabularies that are missing, damaged, or changed at random.
// Each is read, or is an error that names the file.
#include <doctest/doctest.h>

#include <fstream>

#include "../token_files.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::token_files;

TEST_CASE("load_corpus: data that are missing, empty, truncated or wrong are rejected by name") {
    Folder folder;
    const std::string good = token_file(std::vector<uint16_t>(100, 7));
    check_data_error(folder / "missing", "missing");
    check_data_error(std::string(5000, 'x'), "xxx");
    check_data_error(",", "--data");
    check_data_error("/dev/null", "/dev/null");
    check_data_error(folder.write("empty", ""), "empty");
    check_data_error(folder.write("empty.bin", ""), "empty.bin");
    check_data_error(folder.write("zeros", std::string("text\0text", 9)), "zeros");
    folder.write("hollow/binary", std::string(10, '\0'));
    check_data_error(folder / "hollow", "hollow");
    check_data_error(folder.write("text", "text") + "," + folder.write("good.bin", good), "good.bin");
    for (size_t size = 1; size < good.size(); size += 13)
        check_data_error(folder.write("cut.bin", good.substr(0, size)), "cut.bin");
    check_data_error(folder.write("long.bin", good + "x"), "long.bin");
    struct WrongWord {
        size_t index;
        int32_t value;
    };
    const WrongWord wrong_words[] = {{0, 20240521}, {0, 0},  {0, 20240801}, {1, 0},   {1, 2},         {1, 7},
                        {2, 0},        {2, -1}, {2, 99},       {2, 101}, {2, INT32_MAX}, {2, INT32_MIN}};
    for (const WrongWord& wrong : wrong_words) {
        CAPTURE(wrong.index);
        CAPTURE(wrong.value);
        check_data_error(folder.write("wrong.bin", with_word(good, wrong.index, wrong.value)), "wrong.bin");
    }
    const std::string masked = folder.write("masked.bin", good);
    for (size_t size : {0, 99, 101, 1124}) {
        folder.write("masked.mask", std::string(size, '\1'));
        check_data_error(masked, "masked.mask");
    }
    check_data_error(folder.write("negative.bin", token_file(std::vector<uint32_t>{1, 0x80000000u, 2})),
                       "negative.bin");
}

TEST_CASE("Loader: tokens that were overwritten by larger ones are an error that names the file") {
    Folder folder;
    for (const auto& [before, after] :
         {std::pair{uint16_t{7}, uint16_t{8}}, {uint16_t{7}, uint16_t{65535}}}) {
        const std::string path = folder.write("in-use.bin", token_file(std::vector<uint16_t>(100, before)));
        Loader loader(load_corpus(path).train, 1, 8, 1);
        int32_t tokens[8], targets[8];
        loader.next(tokens, targets);
        const std::string larger = token_file(std::vector<uint16_t>(100, after));
        std::ofstream(path, std::ios::binary) << larger;  // in place: the loader has the file open
        check_error([&] { loader.next(tokens, targets); }, "in-use.bin");
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
        // Half of the changes are in the three words of the header that mean something.
        const auto reach = rng.below(2) ? 12 : static_cast<int64_t>(file.size());
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
    CHECK(read > 0);  // a changed token, or a change in an unused word of the header, is not an error
}

TEST_CASE("vocabulary: a damaged table is rejected by name") {
    Folder folder;
    const std::string whole = table(R"(["a", "b"])", "2");
    for (size_t size = 0; size < whole.size(); size++)
        check_error([&] { Vocabulary::read(folder.write("t.json", whole.substr(0, size))); }, "t.json");
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
        check_error([&] { Vocabulary::read(folder.write("t.json", bad)); }, "t.json");
    }
}
