// vocabulary.cpp - data/vocabulary.cpp: tokens become text, and text becomes tokens.
#include "../../data/vocabulary.h"

#include "../help/files.h"
#include "../help/random.h"

using namespace coat;
using namespace coat::test;

// The bytes, and after them these pieces: tokens 256, 257, ...
static Vocabulary learned(const std::vector<std::string>& pieces) {
    Vocabulary v = byte_vocabulary();
    v.pieces.insert(v.pieces.end(), pieces.begin(), pieces.end());
    return v;
}
static std::string parts(const Vocabulary& v, const std::string& text) {  // "he|llo"
    std::string all;
    for (const int32_t token : v.encode(text)) all += (all.empty() ? "" : "|") + v.decode({token});
    return all;
}

TEST_CASE("vocabulary: of all neighbours that are a token the one with the smallest number is joined first") {
    CHECK(parts(learned({"bc", "ab", "abc"}), "abcab") == "abc|ab");  // bc, then ab, then a and bc
    CHECK(parts(learned({"ab", "bc"}), "abc") == "ab|c");
    CHECK(parts(learned({"bc", "ab"}), "abc") == "a|bc");
    CHECK(parts(learned({"aa", "aaaa"}), "aaaaaaa") == "aaaa|aa|a");
    CHECK(byte_vocabulary().encode("").empty());
    CHECK(byte_vocabulary().encode("A\xFF") == Tokens{65, 255});
}

TEST_CASE("vocabulary: no token crosses the end of a word as GPT-2's pattern cuts them") {
    // Each piece would be joined if words did not end between its characters.
    const Vocabulary v =
        learned({"a1", "1a", "a.", ".a", "  ", "\n\n", " \n", "a'", "'s", "a ", "\n a", " a"});
    for (const auto& [text, expected] : std::vector<std::pair<std::string, std::string>>{
             {"a1a.a", "a|1|a|.|a"},
             {"a a", "a| a"},
             {"a  a", "a| | a"},       // the last space belongs to the word that follows
             {"a\n\na", "a|\n|\n|a"},  // so two line ends before a word are two tokens,
             {"a\n\n", "a|\n\n"},      // and at the end of a text they are one
             {"a \n a", "a| \n| a"},
             {"a's'a", "a|'s|'|a"},
             {"  ", "  "},
             {"\xC3\xA9"
              "1",
              "\xC3|\xA9|1"}})
        CHECK(parts(v, text) == expected);
}

TEST_CASE(
    "vocabulary: text that is encoded and decoded is the same; only bytes that are tokens make it possible") {
    FRESH_RANDOM(rng);
    const Vocabulary v = learned({"th", "the", " the", "er", "\xE2\x80", "\xE2\x80\x94", "==", "\t\t"});
    for (int i = 0; i < 200; i++) {
        std::string text;
        while (rng.below(60)) text += rng.below(2) ? v.pieces[size_t(rng.below(v.size()))] : " the";
        CHECK(v.decode(v.encode(text)) == text);
    }
    CHECK(v.is_byte_level());
    Vocabulary twice = v, without = v;  // SentencePiece has <0x41> and "A", and both are the byte 0x41
    twice.pieces.push_back("A");
    without.pieces[7] = "seven";
    CHECK(!twice.is_byte_level());
    CHECK(!without.is_byte_level());
    CHECK(!Vocabulary().is_byte_level());
}
