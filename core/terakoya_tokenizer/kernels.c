/* Loops over characters: MeCab's analysis, and words that a cache knows. `lattice.py` and `word_cache.py` call them.

   The analysis is that of MeCab 0.996, tokenizer.cpp and viterbi.cpp: the words of the dictionary at each position,
   unknown words by the kinds of their characters, and the path whose words and connections cost least; of equal ones
   the one that MeCab finds. Words that end at a position lie side by side here. */

#include <stdint.h>
#include <string.h>

enum {
    LONGEST = 16000,       /* longer lines are left to MeCab, which reads 65,535 bytes ahead; up to here a path's cost
                              fits into 32 bits */
    MOST_NODES = 1 << 18,  /* as are lines with more nodes */
    MOST_MATCHES = 512,
    LONGEST_GROUP = 24     /* MeCab's max-grouping-size: unknown characters after the first one of a group */
};

enum { ORDINARY, WHITE, ODD };  /* kinds of characters */

typedef struct { int32_t base, check; } Unit;

typedef struct { uint16_t left, right; int16_t cost; } Word;

typedef struct {
    const Unit *trie;            /* the double array (darts); a node is a base */
    const int32_t *first;        /* the node of each character up to U+FFFF, -1 where no word begins with it */
    const Word *words;           /* unknown ones last, and one that is none */
    const int16_t *connection;   /* [left number][right number]: the cost of a word's right number before the other's
                                    left number */
    const uint32_t *characters;  /* 32 bits of each character up to U+FFFF: categories, the first of them, how long an
                                    unknown word is at most, whether they form groups, whether there are unknown words
                                    where the dictionary has one */
    const int32_t *unknown;      /* [category][2]: the first unknown word, and how many there are */
    const uint8_t *kinds;        /* of each character up to U+FFFF */
    int64_t rights;              /* how many right numbers there are */
    int64_t line_left, line_right;  /* the numbers of the ends of a line */
} Tables;

typedef struct { int32_t word, count, stop; } Match;

static uint32_t property(const Tables *tables, uint32_t code) {
    return tables->characters[code < 0x10000 ? code : 0];  /* MeCab takes those beyond U+FFFF for U+0000 */
}

static int share_category(uint32_t one, uint32_t other) { return (one & other & 0x3FFFF) != 0; }

/* Returns the child of a node, -1 if it has none for this byte. */
static int32_t child(const Unit *trie, int32_t node, uint32_t byte) {
    const Unit *unit = trie + node + byte + 1;
    return unit->check == node ? unit->base : -1;
}

static int32_t child_of_character(const Unit *trie, int32_t node, uint32_t code) {
    if (code < 0x80) return child(trie, node, code);
    if (code < 0x800) {
        node = child(trie, node, 0xC0 | code >> 6);
    } else {
        if (code < 0x10000) {
            node = child(trie, node, 0xE0 | code >> 12);
        } else {
            node = child(trie, node, 0xF0 | code >> 18);
            if (node >= 0) node = child(trie, node, 0x80 | (code >> 12 & 0x3F));
        }
        if (node >= 0) node = child(trie, node, 0x80 | (code >> 6 & 0x3F));
    }
    return node < 0 ? node : child(trie, node, 0x80 | (code & 0x3F));
}

/* Finds the words of the dictionary at the beginning of a text, the shortest first. Returns how many lengths they
   have. */
static int find_known(const Tables *tables, const uint32_t *text, int begin, int end, Match *matches) {
    int found = 0, place = begin + 1;
    int32_t node = text[begin] < 0x10000 ? tables->first[text[begin]]
                                         : child_of_character(tables->trie, tables->trie[0].base, text[begin]);
    while (node >= 0) {
        const Unit *leaf = tables->trie + node;
        if (leaf->check == node && leaf->base < 0) {
            int32_t value = -leaf->base - 1;
            matches[found++] = (Match){value >> 8, value & 0xFF, place};
            __builtin_prefetch(tables->words + (value >> 8));
        }
        if (place == end || found == MOST_MATCHES) break;
        node = child_of_character(tables->trie, node, text[place++]);
    }
    return found;
}

/* Adds the unknown words at the beginning of a text to those `found` there. Returns the number of both. */
static int find_unknown(const Tables *tables, const uint32_t *text, int begin, int end, Match *matches, int found) {
    uint32_t first = property(tables, text[begin]);
    if (found && !(first >> 31)) return found;
    const int32_t *unknown = tables->unknown + 2 * (first >> 18 & 0xFF);
    int stop = begin + 1, group = -1;
    if (first >> 30 & 1) {
        uint32_t before = first;
        for (group = stop; group < end; group++) {
            uint32_t next = property(tables, text[group]);
            if (!share_category(before, next)) break;
            before = next;
        }
        if (group - stop <= LONGEST_GROUP) matches[found++] = (Match){unknown[0], unknown[1], group};
    }
    for (int length = first >> 26 & 0xF; length > 0 && stop != group; length--) {
        matches[found++] = (Match){unknown[0], unknown[1], stop};
        if (stop == end || !share_category(first, property(tables, text[stop]))) break;
        stop++;
    }
    if (!found) matches[found++] = (Match){unknown[0], unknown[1], stop};
    return found;
}

/* Fetches what `find_known` reads first where the characters at `place` begin a word. */
static void fetch_known(const Tables *tables, const uint32_t *text, int place, int end) {
    if (place + 1 >= end || text[place] >= 0x10000 || tables->first[text[place]] < 0) return;
    const Unit *node = tables->trie + tables->first[text[place]];
    __builtin_prefetch(node);
    if (text[place + 1] >= 0x800) __builtin_prefetch(node + (0xE0 | (text[place + 1] >> 12 & 0xF)) + 1);
}

/* Fetches the costs before a word that are read most often, the first ones. */
static void fetch_costs(const Tables *tables, const Word *word) {
    const int16_t *row = tables->connection + word->left * tables->rights;
    for (int right = 0; right < 128; right += 32) __builtin_prefetch(row + right);
}

/* Counts in `found` (one number a word) how often each word of the dictionary is somewhere in a text, on the best path
   or not. */
void count_words(const Tables *tables, const uint32_t *text, int64_t size, int64_t *found) {
    Match matches[MOST_MATCHES];
    for (int begin = 0; begin < size; begin++) {
        int count = find_known(tables, text, begin, size, matches);
        for (int match = 0; match < count; match++)
            for (int word = 0; word < matches[match].count; word++) found[matches[match].word + word]++;
    }
}

/* A word that may stand in a line, and the best path to it. */
typedef struct { int32_t before, run; } Node;

/* Words with the same characters, whose nodes lie side by side. */
typedef struct { int32_t node, begin, stop, next; } Run;  /* next: the one found before with the same stop */

/* The words that end where others begin: the cost of the path to each, its right number, its node. */
typedef struct {
    int32_t cost[MOST_NODES], node[MOST_NODES];
    uint16_t right[MOST_NODES];
} Ends;

typedef struct {
    Node nodes[MOST_NODES];
    int32_t cost[MOST_NODES];    /* of the path to each node */
    uint16_t right[MOST_NODES];  /* of each node */
    Run runs[MOST_NODES];
    int32_t last_run[LONGEST + 1];  /* with each stop */
    Ends ends;
    int32_t path[LONGEST];
} Work;

/* Returns which of the `count` ends is best before a word with the row of connections `row`, and the cost there. */
static int best_end(const Ends *ends, int count, const int16_t *row, int32_t *cost) {
    int32_t best = INT32_MAX;
    int which = 0;
    for (int end = 0; end < count; end++) {
        int32_t here = ends->cost[end] + row[ends->right[end]];
        which = here < best ? end : which;
        best = here < best ? here : best;
    }
    *cost = best;
    return which;
}

/* Collects the words that end at a position. */
static int collect_ends(Work *work, int place) {
    int count = 0;
    for (int run = work->last_run[place]; run >= 0; run = work->runs[run].next)
        for (int node = work->runs[run].node; node < work->runs[run + 1].node; node++) {
            work->ends.cost[count] = work->cost[node];
            work->ends.right[count] = work->right[node];
            work->ends.node[count++] = node;
        }
    return count;
}

/* Returns the last node of the best path through a line, -1 if the line is left to MeCab. */
static int analyse(const Tables *tables, const uint32_t *line, int size, Work *work) {
    Match matches[MOST_MATCHES + 32];
    int nodes = 1, runs = 1;
    memset(work->last_run, 0xFF, (size + 1) * sizeof *work->last_run);
    work->last_run[0] = 0;
    work->runs[0] = (Run){0, 0, 0, -1};
    work->runs[1].node = 1;
    work->nodes[0] = (Node){-1, 0};
    work->cost[0] = 0;
    work->right[0] = tables->line_right;
    for (int begin = 0; begin < size; begin++) {
        if (work->last_run[begin] < 0) continue;
        int place = begin;  /* the next character that is no space; the line's last one is none */
        uint32_t before = property(tables, ' '), next;
        while (share_category(before, next = property(tables, line[place]))) {
            before = next;
            place++;
        }
        fetch_known(tables, line, begin + 4, size);
        int found = find_known(tables, line, place, size, matches), total = 0;
        if (found == MOST_MATCHES) return -1;
        found = find_unknown(tables, line, place, size, matches, found);
        for (int match = 0; match < found; match++) total += matches[match].count;
        if (nodes + total + 1 >= MOST_NODES) return -1;
        int ending = collect_ends(work, begin);
        while (found--) {  /* MeCab takes the last ones first */
            Match match = matches[found];
            work->runs[runs] = (Run){nodes, place, match.stop, work->last_run[match.stop]};
            work->last_run[match.stop] = runs;
            for (const Word *word = tables->words + match.word, *last = word + match.count; word < last; word++) {
                int32_t cost;
                fetch_costs(tables, word + 1);
                int end = best_end(&work->ends, ending, tables->connection + word->left * tables->rights, &cost);
                work->nodes[nodes] = (Node){work->ends.node[end], runs};
                work->cost[nodes] = cost + word->cost;
                work->right[nodes++] = word->right;
            }
            work->runs[++runs].node = nodes;
        }
    }
    int32_t cost;
    int ending = collect_ends(work, size);
    return work->ends.node[best_end(&work->ends, ending, tables->connection + tables->line_left * tables->rights, &cost)];
}

static int is_left_to_mecab(const Tables *tables, const uint32_t *line, int64_t size) {
    if (size > LONGEST || (line[size - 1] < 0x10000 && tables->kinds[line[size - 1]] != ORDINARY)) return 1;
    for (int64_t place = 0; place < size; place++)
        if (line[place] < 0x10000 && tables->kinds[line[place]] == ODD) return 1;
    return 0;
}

int64_t work_size(void) { return sizeof(Work); }

/* Splits lines into words, which it writes with spaces between them to `out`, and where each line ends there to
   `ends`. A line that is left to MeCab has no characters there. */
void split_lines(const Tables *tables, Work *work, const uint32_t *text, const int64_t *sizes, int64_t lines,
                 uint32_t *out, int64_t *ends) {
    int64_t done = 0;
    for (int64_t number = 0; number < lines; text += sizes[number++]) {
        if (sizes[number] && !is_left_to_mecab(tables, text, sizes[number])) {
            int length = 0;
            for (int node = analyse(tables, text, sizes[number], work); node > 0; node = work->nodes[node].before)
                work->path[length++] = work->nodes[node].run;
            while (length--) {
                Run run = work->runs[work->path[length]];
                for (int place = run.begin; place < run.stop; place++) out[done++] = text[place];
                if (length) out[done++] = ' ';
            }
        }
        ends[number] = done;
    }
}

/* A word of a cache: its hash, where its characters and its tokens begin, and how many of both it has. */
typedef struct { uint64_t hash; int64_t first_character, first_token; int32_t characters, tokens; } Entry;

/* Finds words, each of which ends with a space, in a cache: where each begins, its hash, and its row, 0 where the slot
   of its hash has another one or none. `factors` are those of the `longest` characters of a word. Returns the number of
   words, -1 if one is longer. */
int64_t find_words(const uint32_t *text, int64_t size, const uint64_t *factors, int64_t longest, const int32_t *slots,
                   int64_t slot_bits, const Entry *entries, const uint32_t *characters, int64_t *begins,
                   uint64_t *hashes, int32_t *rows) {
    int64_t found = 0, begin = 0;
    uint64_t hash = 0;
    for (int64_t place = 0; place < size; place++) {
        if (place - begin == longest) return -1;
        hash += text[place] * factors[place - begin];
        if (text[place] != ' ') continue;
        int64_t length = place + 1 - begin;
        int32_t row = slots[hash >> (64 - slot_bits)];
        const Entry *entry = entries + row;
        int same = entry->hash == hash && entry->characters == length &&
                   !memcmp(characters + entry->first_character, text + begin, length * sizeof *text);
        begins[found] = begin;
        hashes[found] = hash;
        rows[found++] = same ? row : 0;
        begin = place + 1;
        hash = 0;
    }
    return found;
}
