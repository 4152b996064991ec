// data_files.cpp - data/data_files.cpp: what is text, which files --data names, what is left out and why, and
// which file of a run was changed.
#include <doctest/doctest.h>

#include <set>
#include <sys/stat.h>

#include "../help/program.h"

using namespace coat;
using namespace coat::test;

static std::string utf8(uint32_t c) {  // also of what is no character
    auto byte = [&](uint32_t first, int shift, uint32_t mask) { return char(first | (c >> shift & mask)); };
    if (c < 0x80) return {byte(0, 0, 0x7F)};
    if (c < 0x800) return {byte(0xC0, 6, 0x1F), byte(0x80, 0, 0x3F)};
    if (c < 0x10000) return {byte(0xE0, 12, 0x0F), byte(0x80, 6, 0x3F), byte(0x80, 0, 0x3F)};
    return {byte(0xF0, 18, 0x07), byte(0x80, 12, 0x3F), byte(0x80, 6, 0x3F), byte(0x80, 0, 0x3F)};
}

static std::string utf16(const std::string& ascii, bool big_endian, bool mark) {
    std::string text = big_endian ? "\xFE\xFF" : "\xFF\xFE";
    if (!mark) text.clear();
    for (char c : ascii) text += big_endian ? std::string{'\0', c} : std::string{c, '\0'};
    return text;
}

static std::vector<std::string> paths_in(const Folder& folder, const std::vector<std::string>& paths) {
    std::vector<std::string> inside;
    for (const std::string& path : paths) inside.push_back(path.substr(folder.path.string().size() + 1));
    return inside;
}

// The reason why a path of the folder is left out; "" if it is not.
static std::string reason_of(const Folder& folder, const std::vector<LeftOut>& left_out,
                             const std::string& path) {
    for (const LeftOut& file : left_out)
        if (file.path == folder / path) return file.reason;
    return "";
}

TEST_CASE("utf8_length: all characters and nothing else are UTF-8") {
    int64_t wrong = 0;
    for (uint32_t c = 0; c < 0x120000; c++) {
        const bool valid = c < 0x110000 && (c < 0xD800 || c > 0xDFFF);
        const std::string one = utf8(c);
        wrong += utf8_length(one) != (valid ? one.size() : 0);
    }
    CHECK(wrong == 0);
    for (const char* overlong : {"\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xF0\x8F\xBF\xBF"})
        CHECK(utf8_length(overlong) == 0);
    // A wrong byte at any place of a text ends it there: characters of all lengths, and eight bytes at a
    // time.
    std::string text, whole = "12345678" + utf8(0xE9) + "x" + utf8(0x20AC) + utf8(0x1F600) + "abcdefghijk";
    for (size_t cut = 0; cut <= whole.size(); cut++) {
        size_t begin = cut;  // of the character that is cut
        while (begin < whole.size() && (whole[begin] & 0xC0) == 0x80) begin--;
        CHECK(utf8_length(whole.substr(0, cut)) == begin);
        CHECK(utf8_length(whole.substr(0, begin) + "\xFF" + whole.substr(begin)) == begin);
        CHECK(utf8_length(whole.substr(0, begin) + "\x80" + whole.substr(begin)) == begin);
    }
    CHECK(utf8_length("") == 0);
}

TEST_CASE("why_not_text: what is no text has its reason and UTF-16 its own words") {
    const std::string ascii = "This is a text of some lines,\r\n\tand a tab.\n";
    for (const std::string& text :
         {ascii, std::string(), "\xEF\xBB\xBF" + ascii, utf8(0x1F600), utf8(0xFFFE)})
        CHECK(why_not_text(text) == "");
    for (const bool big_endian : {false, true})
        for (const bool mark : {false, true}) {
            CHECK(contains(why_not_text(utf16(ascii, big_endian, mark)), "is UTF-16"));
        }
    CHECK(contains(why_not_text("\xFF\xFE\x2D\x4E\x87\x65"), "is UTF-16"));  // Chinese
    CHECK(contains(why_not_text(std::string("\0\0\xFE\xFF\0\0\0t", 8)), "UTF-32"));
    CHECK(contains(why_not_text(ascii + std::string("\0", 1) + ascii),
                   concat("NUL byte (byte ", ascii.size(), ")")));
    CHECK(contains(why_not_text(std::string(64, '\0')), "NUL byte (byte 0)"));
    CHECK(contains(why_not_text("caf\xE9 au lait"), "is not UTF-8 (byte 3)"));
    for (const size_t bytes : {1, 2, 3}) {
        const std::string cut = ascii + utf8(0x1F600).substr(0, bytes);
        CHECK(contains(why_not_text(cut),
                       concat("in the middle of a UTF-8 character; cut it after ", ascii.size())));
    }
    CHECK(contains(why_not_text(ascii + "\xFF"), "is not UTF-8"));
}

TEST_CASE("find_data_files: links to folders are left out and links to files are followed") {
    Folder folder;
    for (const char* name : {"in/b/x", "in/z", "in/b/c/y", "outside/one", "outside/two"})
        folder.write(name, name);
    const std::pair<const char*, const char*> links[] = {
        {"../outside", "in/outside"}, {".", "in/b/itself"}, {"..", "in/above"}, {"/", "in/root"}};
    for (const auto& [to, at] : links) fs::create_directory_symlink(to, folder.path / at);
    fs::create_symlink("none", folder.path / "in/none");
    fs::create_symlink("../outside/one", folder.path / "in/one");
    fs::create_directory_symlink("in", folder.path / "linked");
    const FoundFiles found = find_data_files(folder / "in", {});
    CHECK(paths_in(folder, found.paths) == std::vector<std::string>{"in/b/c/y", "in/b/x", "in/one", "in/z"});
    CHECK(contains(reason_of(folder, found.left_out, "in/none"), "a link that leads nowhere"));
    for (const auto& [to, at] : links)
        CHECK(contains(reason_of(folder, found.left_out, at), "a link to a folder; give that folder, too"));
    CHECK(found.left_out.size() == 1 + std::size(links));
    CHECK(find_data_files(folder / "linked", {}).paths.size() == 4);  // what the user names may be a link
    // A file that is found twice is read once, whatever its names are.
    fs::create_hard_link(folder.path / "in/z", folder.path / "in/hard");
    fs::create_symlink("b/x", folder.path / "in/soft");
    CHECK(
        find_data_files(folder / "in" + "," + folder / "in/z" + "," + folder / "outside", {}).paths.size() ==
        5);
}

TEST_CASE("find_data_files: what is left out of a folder is named with the reason") {
    Folder folder;
    for (const char* name :
         {"a.txt", "in/b.json", "in/c.jsonl", "d.parquet", "e.txt.gz", "f.jsonl.zst", "g.zip", "caf\xE9.txt",
          ".git/config", "out/step-000001/model.safetensors", "out/notes", "big/model.safetensors.index.json",
          "big/merges.txt", "log", "tokenizer.json"})
        folder.write(name, "text");
    REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
    const FoundFiles found = find_data_files(folder, {folder / "log", "", folder / "never-written"});
    CHECK(paths_in(folder, found.paths) ==
          std::vector<std::string>{"a.txt", "caf\xE9.txt", "in/b.json", "out/notes", "tokenizer.json"});
    for (const auto& [path, reason] : {std::pair{"in/c.jsonl", "data/tokenize.py"},
                                       {"d.parquet", "data/tokenize.py"},
                                       {"e.txt.gz", "unpack it"},
                                       {"f.jsonl.zst", "unpack it"},
                                       {"g.zip", "unpack it"},
                                       {"out/step-000001", "a checkpoint"},
                                       {"big", "a model"},
                                       {"log", "is written by this run"},
                                       {"pipe", "neither a file nor a folder"}}) {
        CAPTURE(std::string(path));
        CHECK(contains(reason_of(folder, found.left_out, path), reason));
    }
    CHECK(found.left_out.size() == 9);
    const FoundFiles resumed = find_data_files(folder, {folder / "out"});
    CHECK(contains(reason_of(folder, resumed.left_out, "out"), "is written by this run"));
    CHECK(find_data_files(folder / "out", {folder / "out"}).paths.size() == 1);  // named itself
    // Files beside token files are counted, but for those of their tokenizer.
    folder.write("train.bin", "tokens");
    const FoundFiles tokens = find_data_files(folder, {});
    CHECK(paths_in(folder, tokens.paths) == std::vector<std::string>{"train.bin"});
    CHECK(contains(tokens.left_out.back().reason, "has token files; its 10 other files are no data"));
    check_error([&] { find_data_files(folder / "e.txt.gz", {}); }, "--data " + folder / "e.txt.gz",
                "unpack it");
    check_error([&] { find_data_files(folder / "in/c.jsonl", {}); }, folder / "in/c.jsonl", "tokenize.py");
}

TEST_CASE("sentences_of: ten files are named and then there is a count") {
    std::vector<LeftOut> left_out;
    for (const int files : {1, 10, 11, 1000}) {
        while (int(left_out.size()) < files)
            left_out.push_back({concat("file", left_out.size()), "is no text"});
        const std::vector<std::string> sentences = sentences_of(left_out);
        CHECK(sentences.size() == size_t(std::min(files, 11)));
        CHECK(sentences[0] == "left out: file0 is no text");
        if (files > 10) CHECK(sentences.back() == concat("left out: ", files - 10, " more"));
    }
    CHECK(sentences_of({}).empty());
}

TEST_CASE("difference: names the file that was changed or is missing or new") {
    const std::vector<DataFile> before = {{"a", 1, 11}, {"b c\n", 2, 22}, {"caf\xE9", 3, UINT64_MAX}};
    for (const DataFile& file : before) {
        const DataFile read = DataFile::from_line(file.line());
        CHECK((read.path == utf8_path(file.path) && read.bytes == file.bytes && read.hash == file.hash));
        CHECK(utf8_length(file.line()) == file.line().size());
    }
    CHECK(difference(before, before) == "");
    const DataFile a = before[0], b = before[1], c = before[2], x = {"x", 7, 77};
    for (const auto& [now, says] : std::vector<std::pair<std::vector<DataFile>, std::string>>{
             {{{"a", 1, 12}, b, c}, "a has other bytes"},
             {{a, b, {"caf\xE9", 4, 5}}, "caf\xE9 has 4 bytes, not 3"},
             {{b, c}, "a is missing"},
             {{a, b}, "caf\xE9 is missing"},
             {{a, x, b, c}, "x is new"},
             {{a, b, c, x}, "x is new"},
             {{a, b, x}, "x has 7 bytes, not 3"},
             {{{"y/a", 1, 11}, {"y/b c\n", 2, 22}, {"y/c", 3, UINT64_MAX}}, ""},  // a copy of the folder
             {{{"y/a", 1, 11}, {"y/b", 2, 23}}, "y/b has other bytes"}})
        CHECK(difference(before, now) == says);
}

// A run whose log and output lie among its data, as with --data ., where others write, too.
TEST_CASE("train: a run goes on where its own log and output and new files lie in the folder of its data") {
    const std::string flags = " --device cpu --model \"$SMALL\" --batch 2 --seq 16 --sample-every 0 ";
    for (const std::string ranks : {"", "--ranks 2 "}) {
        RunFolder folder;
        const std::string run =
            "train" + flags + ranks + "--data . --steps 2 --log run.txt > printed.txt 2>&1";
        require_success(shell(folder, run));
        const std::string first = read_file(folder / "printed.txt");
        CHECK(contains(first, "left out: ./printed.txt is written by this run\n"));
        folder.write("a-note.txt", "written meanwhile");
        const Ended resumed = train(folder, "--device cpu --resume out --steps 4 --log run.txt " + ranks);
        require_success(resumed);
        for (const char* name : {"run.txt is written by this run", "out is written by this run",
                                 "a-note.txt is new", "printed.txt is new"})
            CHECK(contains(resumed.out, concat("left out: ./", name)));
        // Without --log its earlier log is like any other new file; a file of the data that is changed is
        // named.
        require_success(train(folder, "--device cpu --resume out --steps 5 " + ranks));
        folder.write("text", read_file(folder / "text") + "x");
        check_one_sentence(train(folder, "--device cpu --resume out --steps 6 " + ranks), "./text has ");
        fs::remove(folder.path / "text");
        check_failed(train(folder, "--device cpu --resume out --steps 6 " + ranks), "has no text");
    }
}

TEST_CASE("train: files whose names are not UTF-8 are read; a flag that is not UTF-8 gets a sentence") {
    RunFolder folder;
    folder.write("in/caf\xE9.txt", read_file(folder / "text"));
    require_success(tiny(folder, "--data in --steps 1 --accumulate 2 --out $(printf 'caf\\351')"));
    require_success(train(folder, "--device cpu --resume $(printf 'caf\\351') --steps 2 --ranks 2"));
    folder.write("in/caf\xE9.txt", read_file(folder / "text") + "x");
    const Ended changed = train(folder, "--device cpu --resume $(printf 'caf\\351') --steps 3");
    CHECK((changed.code == 1 && contains(changed.error, "in/caf\xEF\xBF\xBD.txt has ")));
    const Ended flag = tiny(folder, "--data $(printf 'in/caf\\351.txt') --steps 1");
    CHECK((flag.code == 1 && contains(flag.error, "caf\\xE9.txt is not UTF-8")));
}
