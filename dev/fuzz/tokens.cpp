// dev/fuzz/tokens.cpp - fuzzes the readers of token files and of their vocabulary. The first byte chooses the
// file.
#include "../../data/tokens.h"
#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const coat::fuzz::InputFile tokens("tokens.bin"), vocabulary("vocabulary.txt");
    if (size == 0) return 0;
    const bool is_tokens = data[0] == 't';
    (is_tokens ? tokens : vocabulary).write(data + 1, size - 1);
    coat::fuzz::check_reader([&] {
        if (!is_tokens) {
            const coat::Vocabulary v = coat::Vocabulary::read(vocabulary.path);
            const std::string text = "a longer text; \xC3\xA9\n";
            if (v.decode(v.encode(text)) != text) std::abort();
            return;
        }
        const coat::Corpus corpus = coat::load_corpus(tokens.path);
        coat::Loader loader(corpus.train, 2, 3, 1);
        int32_t in[6], out[6];
        for (int i = 0; i < 4; i++) {
            loader.next(in, out);
            for (int32_t token : in)
                if (token < 0 || token >= corpus.tokens_in_use) std::abort();
        }
    });
    return 0;
}
