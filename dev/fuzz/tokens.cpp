// dev/fuzz/tokens.cpp - fuzzes the readers of token files and of their tokenizer file. The first byte chooses
// the file.
#include "../../data/tokens.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const coat::fuzz::InputFile tokens("tokens.bin"), vocabulary("tokenizer.bin");
    if (size == 0) return 0;
    if (data[0] != 't') {  // with tokens that can be read
        int32_t whole[264] = {20240801, 1, 8};
        tokens.write(reinterpret_cast<const uint8_t*>(whole), sizeof whole);
    }
    (data[0] == 't' ? tokens : vocabulary).write(data + 1, size - 1);
    coat::fuzz::check_reader([&] {
        coat::Corpus corpus = coat::load_corpus(tokens.path);
        const coat::Loader loader(corpus.train, 2, 3, 1);
        const int64_t largest = corpus.train.facts().largest;
        int32_t in[6], out[6];
        for (int i = 0; i < 4; i++) {
            loader.read(i, in, out);
            for (int32_t token : in)
                if (token < 0 || token > largest) std::abort();
        }
        corpus.vocabulary.decode({in, in + 6});
    });
    return 0;
}
