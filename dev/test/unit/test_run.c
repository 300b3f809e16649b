// llmc/run.h: the shape of a step, what is due after which step, and the lines printed about steps. The expected
// values are written by hand.
#include "capture.h"
#include "../../../llmc/run.h"

static Settings defaults; // the settings before any test

// ---- the shape of a step ------------------------------------------------------------

static void check_batch(Batch b, int B, int T, int64_t total, int64_t micro_steps) {
    check_msg(b.B == B && b.T == T && b.total == total && b.micro_steps == micro_steps,
              "got B %d, T %d, %lld tokens, %lld micro-batches; want %d, %d, %lld, %lld", b.B, b.T, (long long)b.total,
              (long long)b.micro_steps, B, T, (long long)total, (long long)micro_steps);
}

static void test_batch(void) {
    GPT2Config small = {64, 61, 128, 2, 3, 48, 192, 1e-5f, 0, 0, 0, 0}, large = small;
    large.max_seq_len = 2048;
    settings = defaults;
    check_batch(settle_batch(&small), 4, 64, 256, 1);
    check_batch(settle_batch(&large), 4, 1024, 4096, 1);
    check(memcmp(&settings, &defaults, sizeof(settings)) == 0); // the flags remain as typed
    settings.B = 2, settings.T = 16, settings.total_batch = 96;
    check_batch(settle_batch(&small), 2, 16, 96, 3);
    settings.B = 65536, settings.T = 2048; // more tokens than fit an int
    settings.total_batch = (int64_t)65536 * 2048 * 48;
    check_batch(settle_batch(&large), 65536, 2048, (int64_t)65536 * 2048 * 48, 48);
}

static void write_shard(const char* path, int num_tokens) {
    ShardWriter w;
    Error err;
    if (!shard_writer_open(&w, path, &err)) { die("%s", err.text); }
    for (int i = 0; i < num_tokens; i++) {
        uint16_t token = (uint16_t)(i % 50);
        shard_writer_put(&w, &token, 1);
    }
    if (!shard_writer_close(&w, &err)) { die("%s", err.text); }
}

// -x and -m limited by the data: 1001 tokens for training, 201 for validation
static void test_data(void) {
    static const struct {
        int64_t typed_steps, total, want_steps;
        int typed_val;
        int64_t want_val;
        bool has_val;
    } cases[] = {
        {-1, 0, 31, 20, 6, true}, // 1000 tokens are 31 steps of 32
        {-1, 64, 15, 4, 4, true}, // 31 batches are 15 steps of 2
        {-1, 32000, 1, 20, 0, false}, {7, 0, 7, 6, 6, true}, {0, 0, 0, 7, 6, true},
    };
    static Training t;
    static char train_path[256], val_path[256];
    GPT2Config config = {64, 61, 128, 2, 3, 48, 192, 1e-5f, 0, 0, 0, 0};
    snprintf(train_path, sizeof(train_path), "%s/train.bin", test_dir());
    snprintf(val_path, sizeof(val_path), "%s/val.bin", test_dir());
    write_shard(train_path, 1001);
    write_shard(val_path, 201);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        settings = defaults;
        settings.B = 2, settings.T = 16, settings.total_batch = cases[i].total,
        settings.num_steps = cases[i].typed_steps;
        settings.val_steps = cases[i].typed_val;
        settings.train_data = train_path;
        if (cases[i].has_val) { settings.val_data = val_path; }
        Settings typed = settings;
        memset(&t, 0, sizeof(t));
        t.batch = settle_batch(&config);
        capture_begin();
        training_open_data(&t, &config);
        capture_end();
        check_msg(t.num_steps == cases[i].want_steps && t.num_val_batches == cases[i].want_val,
                  "case %zu: %lld steps, %lld validation batches", i, (long long)t.num_steps,
                  (long long)t.num_val_batches);
        check(t.schedule.num_steps == t.num_steps && t.has_val == cases[i].has_val);
        check(memcmp(&settings, &typed, sizeof(settings)) == 0);

        RunState run; // the checkpoint has the values that were computed
        memset(&run, 0, sizeof(run));
        fill_run_settings(&run, &t);
        check(run.B == 2 && run.T == 16 && run.total_batch_tokens == t.batch.total && run.num_steps == t.num_steps);
        dataloader_close(&t.train);
        if (t.has_val) { dataloader_close(&t.val); }
    }
}

// The names of --fp8's stages are in the order of the enum.
static void test_fp8_stages(void) {
    static const char* const names[][2] = {{"off", "off"},
                                           {"forward", "forward"},
                                           {"forward+dx", "+dx"},
                                           {"forward+dx+head", "+head"},
                                           {"forward+dx+head+dw", "+dw"}};
    for (int stage = FP8_OFF; stage <= FP8_DW; stage++) {
        char name[64];
        cli_format_choice(name, sizeof(name), FP8_STAGES, stage);
        check_str(name, names[stage][0]);
        check(cli_find_choice(FP8_STAGES, names[stage][0]) == stage &&
              cli_find_choice(FP8_STAGES, names[stage][1]) == stage);
    }
    check(cli_find_choice(FP8_STAGES, "+forward") < 0 && cli_find_choice(FP8_STAGES, "dx") < 0);
}

// A checkpoint with the values of --fp8's scales: a run that resumes from it without --fp8 does not save them again, one with a
// later stage, which has more tensors, measures all of them anew.
static void test_resume_without_fp8(void) {
    static Training t;
    GPT2Config config = {64, 61, 128, 2, 3, 48, 192, 1e-5f, 0, 0, 0, 0};
    size_t n = num_parameters(&config);
    float* tensors = (float*)calloc(3 * n, sizeof(float));
    char shard[300], dir[256];
    Error err;
    snprintf(shard, sizeof(shard), "%s/resume.bin", test_dir());
    snprintf(dir, sizeof(dir), "%s/resume", test_dir());
    write_shard(shard, 1001);
    for (int resumed = 0; resumed <= 3; resumed++) {
        settings = defaults;
        settings.B = 2, settings.T = 16, settings.train_data = shard;
        settings.fp8 = resumed == 1 ? FP8_OFF : resumed == 3 ? FP8_DW : FP8_DX;
        training_clear(&t);
        t.batch = settle_batch(&config);
        if (resumed) { path_set(&t.checkpoint, "%s/step_00000005", dir); }
        capture_begin();
        training_open_data(&t, &config);
        training_begin(&t, &config, tensors, tensors + n, tensors + 2 * n);
        capture_end();
        bool kept = t.run.num_fp8 == 2 && t.run.fp8_largest[0] == 0.1f && t.run.fp8_largest[1] == 3.0f;
        bool none = t.run.num_fp8 == 0 && t.run.fp8_largest[0] == 0.0f && t.run.fp8_largest[1] == 0.0f;
        check(t.run.step == (resumed ? 5 : 0) && (resumed == 2 ? kept : none));
        t.run.num_fp8 = 2, t.run.fp8_largest[0] = 0.1f, t.run.fp8_largest[1] = 3.0f;
        t.run.step = 5, t.run.loader = t.position;
        check(resumed || run_save(dir, &t.run, tensors, tensors + n, tensors + 2 * n, NULL, &err));
        dataloader_close(&t.train);
    }
    free(tensors);
}

// ---- what is due --------------------------------------------------------------------

// Returns what is due, from first_step on: "v" validate, "s" sample, "c" checkpoint, "." stop; "|" is a step.
static const char* due_of_run(Training* t, int64_t first_step, int64_t signal_after) {
    static char text[256];
    size_t n = 0;
    t->run.step = first_step;
    t->tasks_step = t->saved_step = first_step > 0 ? first_step : -1; // as training_begin() sets them
    for (;;) {
        run_stop_signal = t->run.step == signal_after ? SIGINT : 0;
        Due due = training_due(t, run_stop_signal);
        run_stop_signal = 0;
        t->tasks_step = t->run.step;
        if (due.save) { t->saved_step = t->run.step; }
        // asked again, as after a signal that dropped the next step: nothing is done twice
        Due again = training_due(t, run_stop_signal);
        check(!again.validate && !again.sample && !again.save);
        if (due.validate) { text[n++] = 'v'; }
        if (due.sample) { text[n++] = 's'; }
        if (due.save) { text[n++] = 'c'; }
        if (due.stop || n > sizeof(text) - 8) { break; }
        text[n++] = '|';
        t->run.step++;
    }
    text[n++] = '.';
    text[n] = '\0';
    return text;
}

static void test_due(void) {
    static Training t;
    const int64_t never = -1;
    settings = defaults;
    settings.output = "somewhere";
    settings.val_every = 3, settings.sample_every = 2, settings.save_every = 4;
    t.has_val = true;
    t.num_steps = 7;
    check_str(due_of_run(&t, 0, never),
              "v||s|v|sc||vs|vsc.");                  // before the first step only validation; at the end everything
    check_str(due_of_run(&t, 4, never), "||vs|vsc."); // the sample of step 4 preceded its checkpoint
    check_str(due_of_run(&t, 6, never), "|vsc.");
    check_str(due_of_run(&t, 7, never), ".");        // the run had already ended
    check_str(due_of_run(&t, 9, never), ".");        // -x is now smaller than the step
    check_str(due_of_run(&t, 0, 5), "v||s|v|sc|c."); // a signal: saves at once, without validation
    check_str(due_of_run(&t, 0, 3), "v||s|vc.");
    check_str(due_of_run(&t, 0, 0), "v."); // no step was done, so nothing is saved
    check_str(due_of_run(&t, 4, 4), ".");  // step 4 is already saved

    settings.output = NULL;
    check_str(due_of_run(&t, 0, never), "v||s|v|s||vs|vs.");
    check_str(due_of_run(&t, 0, 5), "v||s|v|s|.");
    settings.output = "somewhere";
    t.has_val = false;
    check_str(due_of_run(&t, 0, never), "||s||sc||s|sc.");
    settings.hellaswag = "questions"; // HellaSwag counts as validation too
    check_str(due_of_run(&t, 0, never), "v||s|v|sc||vs|vsc.");
    // 0: never, except for a checkpoint at the end
    settings.val_every = settings.sample_every = settings.save_every = 0;
    t.has_val = true;
    check_str(due_of_run(&t, 0, never), "|||||||c.");
    t.num_steps = 0;
    settings.val_every = settings.sample_every = settings.save_every = 1;
    check_str(due_of_run(&t, 0, never), "v.");
}

// --keep-best: a step whose validation loss is the lowest so far is saved
static void test_best(void) {
    static Training t;
    const double losses[] = {5.0, 4.0, 4.5, 4.0, 3.0};
    const bool saved[] = {false, true, false, false, true}; // never before the first step
    settings = defaults;
    settings.output = "somewhere";
    settings.val_every = 1, settings.sample_every = 0, settings.save_every = 0;
    for (int keep = 0; keep < 2; keep++) {
        memset(&t, 0, sizeof(t));
        settings.keep_best = keep;
        t.has_val = true;
        t.num_steps = 100;
        t.saved_step = t.best_step = -1;
        t.run.best_val_loss = INFINITY;
        for (int step = 0; step < 5; step++) {
            t.run.step = step;
            capture_begin();
            training_validated(&t, losses[step], time_ms());
            capture_end();
            check(training_due(&t, run_stop_signal).save == (keep && saved[step]));
        }
        check(t.run.best_val_loss == 3.0);
    }
    // steps 1 and 2 are saved, but saving the second one fails: step 3 is better than what there is, step 4 is not
    const double later[] = {0, 5.0, 3.0, 4.0, 4.5};
    const int last_saved[] = {0, 1, 1, 3, 3};
    t.saver.pruned = true;
    t.run.best_val_loss = t.kept_val_loss = INFINITY, t.best_step = -1;
    for (int step = 1; step <= 4; step++) {
        t.run.step = step;
        capture_begin();
        training_validated(&t, later[step], time_ms());
        t.saver.state = t.run, t.saver.best = t.best_step == step, t.saver.saved = step != 2;
        if (training_due(&t, run_stop_signal).save) { training_report_save(&t); }
        capture_end();
        check(t.saved_step == last_saved[step]);
    }
    check(t.run.best_val_loss == 4.0);
    check_str(printed, "val loss 4.500000\n");
}

// Runs of two days with saves by the clock, simulated: the work that a kill would lose at any moment, and the share of the time
// that the run waits for saves. Saves take up to half as long again as the one before.
static void test_save_clock(void) {
    uint64_t rng = 7;
    for (int run = 0; run < 100; run++) {
        double limit = 600, step = 0.01 + 20 * random_f64(&rng) * random_f64(&rng), usual = 90 * random_f64(&rng);
        double share = run % 3 == 0 ? 1 : 0.1 * random_f64(&rng); // of a save, that the run waits for
        double now = 0, taken = 0, safe = 0, done = -1, write = -1, pause = 0, waited = 0, worst = 0, length = 172800;
        double begun = 0; // when the save that is being written took the weights
        int saves = 0;
        while (now < length) {
            if (done >= 0 && now >= done) { safe = begun, write = done - begun, done = -1; }
            if (done < 0 && save_is_due(now - taken, limit, write, pause, step)) {
                double ms = usual * (0.8 + 0.4 * random_f64(&rng));
                begun = taken = now, done = now + ms, pause = share * ms, waited += pause, now += pause, saves++;
                continue;
            }
            now += step;
            if (done < 0 || now < done) { worst = fmax(worst, now - safe); }
        }
        bool rare = 50 * share * 1.2 * usual > limit - 1.8 * usual - step; // 2% allow no more
        check_msg(rare || worst <= limit, "run %d: %.0f s are lost, a step takes %.1f s, a save %.0f", run, worst, step,
                  usual);
        check_msg(waited <= 0.022 * length + 2 * 90, "run %d waits for %.1f%%, %d saves of %.0f s", run,
                  100 * waited / length, saves, usual);
        check_msg(saves >= 172800 / (50 * 108 + 700), "run %d: %d saves", run, saves);
    }
    check(!save_is_due(299, 600, -1, 0, 1) && save_is_due(300, 600, -1, 0, 1));   // before the first one, halfway
    check(!save_is_due(1e4, 60, 300, 300, 1));                                    // 2% of the time
    check(!save_is_due(599, 600, 300, 0, 1) && save_is_due(600, 600, 300, 0, 1)); // half of the time in writing
}

// What a run says of its saves at the start.
static void test_announced(void) {
    GPT2Config config = {64, 61, 128, 2, 3, 48, 192, 1e-5f, 0, 0, 0, 0};
    static const struct {
        const char* output;
        float minutes;
        int every, keep;
        const char* want;
    } cases[] = {
        {NULL, 0, 0, 5, "note: nothing will be saved: -o DIR saves checkpoints and logs\n"},
        {"/", 10, 0, 2, "checkpoints: so that at most 10 minutes of work are lost, the newest 2 are kept, "},
        {"/", 0, 7, 0, "checkpoints: every 7 steps, all are kept, "},
        {"/", 0, 0, 5, "checkpoints: at the end, one: up to "},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        settings = defaults;
        settings.output = cases[i].output, settings.save_minutes = cases[i].minutes;
        settings.save_every = cases[i].every, settings.keep = cases[i].keep;
        capture_begin();
        training_announce_saves(&config);
        capture_end();
        check_msg(strncmp(printed, cases[i].want, strlen(cases[i].want)) == 0, "case %zu: %s", i, printed);
    }
    check(strstr(printed, " are free\n"));
}

// the estimate of the time left counts what is done between the steps
static void test_time_left(void) {
    static Training t;
    settings = defaults;
    settings.val_every = 10, settings.sample_every = 0, settings.save_every = 0;
    t.num_steps = 105;
    t.step_ms = 100;
    check_near(training_seconds_left(&t, 5), 10.0, 1e-9);
    t.validation_ms = 1000; // at steps 10 to 100, and 105
    check_near(training_seconds_left(&t, 5), 10.0 + 11, 1e-9);
    check_near(training_seconds_left(&t, 10), 9.5 + 11, 1e-9); // that of step 10 is still to be done
    check_near(training_seconds_left(&t, 11), 9.4 + 10, 1e-9);
    check_near(training_seconds_left(&t, 105), 1, 1e-9);
    settings.sample_every = 35, t.sample_ms = 2000; // at 35, 70, 105
    check_near(training_seconds_left(&t, 11), 9.4 + 10 + 6, 1e-9);
    settings.output = "somewhere";
    settings.save_every = 50, t.write_ms = 5000,
    t.save_pause_ms = 100; // at 50, 100, and at the end, where the run waits
    check_near(training_seconds_left(&t, 11), 9.4 + 10 + 6 + 0.2 + 5, 1e-9);
    t.save_pause_ms = INFINITY; // --no-async-save
    check_near(training_seconds_left(&t, 11), 9.4 + 10 + 6 + 10 + 5, 1e-9);
    settings.save_every = 0;
    check_near(training_seconds_left(&t, 11), 9.4 + 10 + 6 + 5, 1e-9);
}

// ---- what is printed about a step ------------------------------------------------------

// like a program that does not judge steps itself
static bool judge_and_count(Training* t, StepReport* r) {
    bool sound = training_judge(t, r);
    training_count(t, r, sound);
    return sound;
}

static void test_judge(void) {
    static Training t;
    settings = defaults;
    settings.skip_loss_z = 3, settings.skip_norm_z = 4;
    StepReport r = {.step = 1};
    uint64_t rng = 5;
    for (; r.step <= OUTLIER_WINDOW; r.step++) {
        r.loss = 4.0 + 0.001 * random_below(&rng, 100), r.norm = 1.0 + 0.001 * random_below(&rng, 100);
        check(judge_and_count(&t, &r) && isnan(r.loss_z) && isnan(r.norm_z)); // no z-scores until the windows are full
    }
    capture_begin();
    r.loss = 40;
    bool loss_passes = judge_and_count(&t, &r);
    double loss_z = r.loss_z;
    r.step++, r.loss = 4.05, r.norm = 10;
    bool norm_passes = judge_and_count(&t, &r);
    double norm_z = r.norm_z;
    r.step++, r.norm = 1.05;
    bool good_passes = judge_and_count(&t, &r);
    int in_a_row[3];
    for (int i = 0; i < 3; i++) {
        r.step++;
        r.loss = i == 0 ? (double)NAN : 4.05, r.norm = i == 1 ? (double)INFINITY : 1.05;
        check(judge_and_count(&t, &r) == (i == 2));
        in_a_row[i] = t.nonfinite_in_a_row;
    }
    capture_end();
    check(!loss_passes && !norm_passes && good_passes);
    check(loss_z > 100 && norm_z > 100);
    check(in_a_row[0] == 1 && in_a_row[1] == 2 && in_a_row[2] == 0);
    check(t.run.skipped_steps == 4);
    char want[512];
    snprintf(want, sizeof(want),
             "step 129: loss z-score %.2f is over -sl 3: update skipped\n"
             "step 130: gradient norm z-score %.2f is over -sg 4: update skipped\n"
             "step 132: loss nan, gradient norm 1.050000: not finite, weights left as they are\n"
             "step 133: loss 4.050000, gradient norm inf: not finite, weights left as they are\n",
             loss_z, norm_z);
    check_str(printed, want);
}

// what is said at the end about skipped steps, and whether the run has failed
static void test_skipped(void) {
    static const struct {
        int first, step, skipped, nonfinite; // skipped: in this process
        bool good;
        const char* want;
    } cases[] = {
        {5, 9, 0, 0, true, ""},
        {5, 105, 49, 1, true, "49 of 100 steps were skipped, 1 of them with a loss or gradient that was not finite\n"},
        {5, 105, 99, 99, true,
         "warning: 99 of 100 steps were skipped, 99 of them with a loss or gradient that was not finite: take a lower "
         "-l, "
         "a longer -u or other weights\n"},
        {5, 105, 60, 1, true,
         "warning: 60 of 100 steps were skipped, 1 of them with a loss or gradient that was not finite: raise -sl and "
         "-sg, "
         "or leave them out\n"},
        {5, 8, 3, 3, false,
         "error: 3 of 3 steps were skipped, 3 of them with a loss or gradient that was not finite: nothing was "
         "learned: "
         "take a lower -l, a longer -u or other weights\n"},
        {0, 0, 0, 0, true, ""},
        {9, 9, 0, 0, true, ""}, // resumed after a good run
        {-9, 9, 0, 0, false,    // resumed after a run that had skipped all steps
         "error: 9 of 9 steps were skipped: nothing was learned: take a lower -l, a longer -u or other weights\n"},
    };
    for (size_t k = 0; k < sizeof(cases) / sizeof(cases[0]); k++) {
        static Training t;
        training_clear(&t);
        t.first_step = abs(cases[k].first), t.run.step = cases[k].step;
        t.first_skipped = cases[k].first < 0 ? t.first_step : cases[k].first / 2;
        t.run.skipped_steps = t.first_skipped + cases[k].skipped;
        t.num_nonfinite = cases[k].nonfinite;
        int real_stderr = dup(STDERR_FILENO);
        capture_begin();
        dup2(STDOUT_FILENO, STDERR_FILENO);
        bool good = training_report_skipped(&t);
        capture_end();
        dup2(real_stderr, STDERR_FILENO);
        close(real_stderr);
        check_msg(good == cases[k].good, "case %zu", k);
        check_str(printed, cases[k].want);
    }
}

static void test_report(void) {
    static Training t;
    Error err;
    GPT2Config config = {64, 61, 128, 2, 3, 48, 192, 1e-5f, 0, 0, 0, 0};
    Batch batch = {2, 16, 64, 2};
    char dir[256], path[300], log[1024] = "";
    snprintf(dir, sizeof(dir), "%s/report", test_dir());
    settings = defaults;
    t.run.config = config, t.batch = batch, t.num_steps = 10;
    check(logger_open(&t.logger, dir, -1, &err));
    StepReport r = {3, 3e-4f, 4.25, 0.875, (double)NAN, 2.5, 500.0, 2.0};
    // per token 6 FLOPs for each weight except wpe's, and 6 L C T for attention; 64 tokens in half a second
    double flops = (6.0 * (double)(num_parameters(&config) - 64 * 48) + 6.0 * 2 * 48 * 16) * 64 / 0.5;
    check_near(training_flops(&t, 500.0), flops, 1.0);
    capture_begin();
    training_report(&t, &r, 2 * flops, "fp32", "");
    capture_end();
    check_str(printed,
              "step    3/10 | loss 4.250000 | norm 0.8750 (+2.50z)| lr 3.00e-04 | 500.00 ms | 50.0% fp32 MFU | "
              "128 tok/s | ETA 4s\n");
    settings.fp8 = FP8_DW;     // log.jsonl has what has saturated
    r.step = 4, r.ms = 1500.0; // the remaining time is estimated with 0.9 * 500 + 0.1 * 1500 = 600 ms per step
    capture_begin();
    training_report(&t, &r, flops / 3, "bf16", " | 1.5 TFLOP/s | 2.0 GB");
    capture_end();
    check_str(printed,
              "step    4/10 | loss 4.250000 | norm 0.8750 (+2.50z)| lr 3.00e-04 | 1500.00 ms | 100.0% bf16 MFU | "
              "43 tok/s | 1.5 TFLOP/s | 2.0 GB | 2 fp8 tensors saturated | ETA 4s\n");
    check_near(t.step_ms, 600.0, 1e-9);
    check(logger_close(&t.logger, &err));
    settings.fp8 = FP8_OFF;
    capture_begin();
    training_report(&t, &r, 0, "fp32", ""); // on a CPU
    capture_end();
    char want[64];
    snprintf(want, sizeof(want), "| 1500.00 ms | %.1f GFLOP/s | 43 tok/s", 1e-9 * flops / 3);
    check(strstr(printed, want) && !strchr(printed, '%'));
    snprintf(path, sizeof(path), "%s/main.log", dir);
    FILE* f = fopen(path, "rb");
    check(f && fread(log, 1, sizeof(log) - 1, f) > 0);
    if (f) { fclose(f); }
    check_str(log, "s:3 trl:4.2500 lr:0.000300 norm:0.88\ns:4 trl:4.2500 lr:0.000300 norm:0.88\n");
    snprintf(path, sizeof(path), "%s/log.jsonl", dir);
    memset(log, 0, sizeof(log));
    f = fopen(path, "rb");
    check(f && fread(log, 1, sizeof(log) - 1, f) > 0);
    if (f) { fclose(f); }
    const char *first = strstr(log, "fp8_saturated"), *second = strstr(log, "{\"step\":4");
    check_msg(first && second && first > second && strstr(first, "fp8_saturated\":2}"), "%s", log);
}

static void test_sample(void) {
    static Training t;
    TrainingSample s;
    GPT2Config config = {64, 61, 128, 2, 3, 48, 192, 1e-5f, 0, 0, 0, 0};
    t.run.config = config;
    t.run.sampler_rng = 77;
    t.start_token = 60;
    capture_begin();
    training_sample_begin(&t, &s);
    check(s.prompt == 60 && s.sampler.rng == 77);
    check(s.sampler.temperature == 1.0f && s.sampler.top_k == 0 && s.sampler.top_p == 1.0f);
    text_token(&s.out, 5);
    text_token(&s.out, 12);
    s.sampler.rng = 78;
    training_sample_end(&t, &s, NULL);
    training_sample_begin(&t, &s);
    check(s.prompt == 60 && s.sampler.rng == 78);
    training_sample_end(&t, &s, "the logits are not numbers");
    capture_end();
    check_str(printed,
              "generating:\n---\n5 12 \n---\ngenerating:\n---\n\n---\nno sample: the logits are not numbers\n");
}

// by hand: 6 FLOPs per weight of a matmul or vector, and attention's; a head of its own does the work of a tied one
static void test_flops(void) {
    GPT2Config config = {4, 3, 128, 2, 1, 8, 32, 1e-5f, 0, 0, 0, 0};
    double layer = 2 * 8 + 24 * 8 + 24 + 8 * 8 + 8 + 2 * 8 + 32 * 8 + 32 + 8 * 32 + 8;
    double want = 6 * (128 * 8 + 2 * layer + 2 * 8) + 6 * 2 * 8 * 4;
    check_near(training_flops_per_token(&config, 4), want, 1e-9);
    config.untied_head = 1;
    check_near(training_flops_per_token(&config, 4), want, 1e-9);
}

int main(int argc, char** argv) {
    static const Test tests[] = {
        {"batch", "the shape of a step from flags and model; the flags stay as they were", test_batch},
        {"data", "steps of an epoch, batches of a validation", test_data},
        {"fp8_stages", "what --fp8 takes", test_fp8_stages},
        {"resume_without_fp8", "forgets the scales of the run before", test_resume_without_fp8},
        {"due", "validation, sample, checkpoint and stop, step by step", test_due},
        {"best", "--keep-best saves the lowest validation loss", test_best},
        {"save_clock", "what a kill loses, and how long a run waits, with saves by the clock", test_save_clock},
        {"announced", "what a run says of its saves at the start", test_announced},
        {"time_left", "steps, validation, samples and saves", test_time_left},
        {"skipped", "how many steps, why, and whether the run has failed", test_skipped},
        {"judge", "outliers and what is not finite change no weights, and are counted", test_judge},
        {"report", "the step line with and without more columns, the time left, main.log", test_report},
        {"flops", "of a token, with a tied head and with one of its own", test_flops},
        {"sample", "the frame of a sample in the middle of a run", test_sample},
    };
    defaults = settings;
    return run_tests(argc, argv, tests, sizeof(tests) / sizeof(tests[0]));
}
