// Runs one model through libllama on the CPU and prints what two builds can be compared by.
//
//   llama_check MODEL.gguf THREADS < commands
//
// Commands, one a line, each from an empty context; the answer is one line:
//   nll CTX FILE          -> nll MEAN ...    of each whole chunk of CTX tokens of a text, each from an empty context: the mean
//                                          negative log likelihood, in nat, of its tokens given those before them
//   greedy N ID ID ...    -> greedy ID ...  the N ids of largest logit after the prompt, or fewer before an end token
//   prefill N             -> prefill SECONDS
//   decode N              -> decode SECONDS  of N single tokens after a prompt of 4

#include "llama.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

static const int MAX_TOKENS = 2048;

[[noreturn]] static void refuse(const std::string & what) {
    fprintf(stderr, "llama_check: %s\n", what.c_str());
    exit(2);
}

struct session {
    llama_model *       model;
    llama_context *     ctx;
    const llama_vocab * vocab;
    int                 n_vocab;
    int                 used = 0;

    session(const char * path, int threads) {
        llama_model_params mp = llama_model_default_params();
        mp.n_gpu_layers = 0;
        model = llama_model_load_from_file(path, mp);
        if (!model) {
            refuse(std::string(path) + ": not loaded");
        }
        llama_context_params cp = llama_context_default_params();
        cp.n_ctx           = MAX_TOKENS;
        cp.n_batch         = MAX_TOKENS;
        cp.n_ubatch        = 512;
        cp.n_threads       = threads;
        cp.n_threads_batch = threads;
        cp.no_perf         = true;
        ctx = llama_init_from_model(model, cp);
        if (!ctx) {
            refuse(std::string(path) + ": no context");
        }
        vocab   = llama_model_get_vocab(model);
        n_vocab = llama_vocab_n_tokens(vocab);
    }
    ~session() {
        llama_free(ctx);
        llama_model_free(model);
    }
    void clear() {
        llama_memory_clear(llama_get_memory(ctx), true);
        used = 0;
    }
    // logits of every token when `all`, else of the last
    void decode(const std::vector<llama_token> & ids, bool all) {
        if (ids.empty() || used + (int) ids.size() > MAX_TOKENS) {
            refuse("a context of " + std::to_string(used + ids.size()) + " tokens, expected 1 to " + std::to_string(MAX_TOKENS));
        }
        llama_batch batch = llama_batch_init(ids.size(), 0, 1);
        batch.n_tokens = ids.size();
        for (int i = 0; i < batch.n_tokens; i++) {
            if (ids[i] < 0 || ids[i] >= n_vocab) {
                refuse("token " + std::to_string(ids[i]) + " of a vocabulary of " + std::to_string(n_vocab));
            }
            batch.token[i]     = ids[i];
            batch.pos[i]       = used + i;
            batch.n_seq_id[i]  = 1;
            batch.seq_id[i][0] = 0;
            batch.logits[i]    = all || i + 1 == batch.n_tokens;
        }
        if (llama_decode(ctx, batch) != 0) {
            refuse("decode failed");
        }
        used += batch.n_tokens;
        llama_batch_free(batch);
    }
};

static std::vector<llama_token> tokens_of(session & s, const std::string & path) {
    std::ifstream in(path, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
    if (text.empty()) {
        refuse(path + ": no text");
    }
    std::vector<llama_token> ids(text.size() + 8);
    const int n = llama_tokenize(s.vocab, text.data(), text.size(), ids.data(), ids.size(), false, false);
    if (n < 0) {
        refuse(path + ": not tokenized");
    }
    ids.resize(n);
    return ids;
}

static double nll(session & s, const std::vector<llama_token> & ids) {
    s.clear();
    s.decode(ids, true);
    double sum = 0;
    for (size_t i = 0; i + 1 < ids.size(); i++) {
        const float * logits = llama_get_logits_ith(s.ctx, i);
        double max = -INFINITY, total = 0;
        for (int v = 0; v < s.n_vocab; v++) {
            max = std::fmax(max, logits[v]);
        }
        for (int v = 0; v < s.n_vocab; v++) {
            total += std::exp(logits[v] - max);
        }
        sum += max + std::log(total) - logits[ids[i + 1]];
    }
    return sum / (ids.size() - 1);
}

static std::vector<llama_token> greedy(session & s, int n, const std::vector<llama_token> & prompt) {
    s.clear();
    std::vector<llama_token> out;
    std::vector<llama_token> next = prompt;
    while ((int) out.size() < n) {
        s.decode(next, false);
        const float * logits = llama_get_logits_ith(s.ctx, -1);
        int best = 0;
        for (int v = 1; v < s.n_vocab; v++) {
            if (logits[v] > logits[best]) {
                best = v;
            }
        }
        if (llama_vocab_is_eog(s.vocab, best)) {
            break;
        }
        out.push_back(best);
        next = { best };
    }
    return out;
}

// token ids that exist in any vocabulary of some size
static std::vector<llama_token> some_ids(int n) {
    std::vector<llama_token> ids;
    for (int i = 0; i < n; i++) {
        ids.push_back(i % 64 + 1);
    }
    return ids;
}

template <typename F> static double seconds(F && f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int main(int argc, char ** argv) {
    if (argc != 3 || atoi(argv[2]) < 1) {
        refuse("usage: llama_check MODEL.gguf THREADS < commands");
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();
    session s(argv[1], atoi(argv[2]));

    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream words(line);
        std::string command;
        words >> command;
        int n = 0;
        if (!(words >> n) || n < 1) {
            refuse("command '" + line.substr(0, 40) + "', expected a count");
        }
        std::vector<llama_token> ids;
        std::string file;
        if (command == "nll") {
            std::getline(words >> std::ws, file);
            ids = tokens_of(s, file);
        }
        for (llama_token id; words >> id;) {
            ids.push_back(id);
        }
        if (command == "nll" && n > 1 && (int) ids.size() >= n) {
            printf("nll");
            for (size_t at = 0; at + n <= ids.size(); at += n) {
                printf(" %.17g", nll(s, { ids.begin() + at, ids.begin() + at + n }));
            }
            printf("\n");
        } else if (command == "greedy" && !ids.empty()) {
            printf("greedy");
            for (llama_token id : greedy(s, n, ids)) {
                printf(" %d", id);
            }
            printf("\n");
        } else if (command == "prefill") {
            s.clear();
            printf("prefill %.9f\n", seconds([&] { s.decode(some_ids(n), false); }));
        } else if (command == "decode") {
            s.clear();
            s.decode(some_ids(4), false);
            printf("decode %.9f\n", seconds([&] { for (llama_token id : some_ids(n)) { s.decode({ id }, false); } }));
        } else {
            refuse("command '" + line.substr(0, 40) + "'");
        }
        fflush(stdout);
    }
    return 0;
}
