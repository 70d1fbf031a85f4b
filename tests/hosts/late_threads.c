/* Preloaded: where LATE is set, gloo's threads are late whenever they ask for Python, as on a machine that has no core
   for them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

static void be_late(void) {
    char name[16] = "";
    prctl(PR_GET_NAME, name);
    if (strcmp(name, "pt_gloo_runloop") == 0 && getenv("LATE")) {
        struct timespec time = {1, 0};
        nanosleep(&time, 0);
    }
}

#define LATE(type, function, parameters, arguments)                            \
    type function parameters {                                                 \
        static type(*real) parameters;                                         \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #function);     \
        be_late();                                                             \
        return real arguments;                                                 \
    }

LATE(int, PyGILState_Ensure, (void), ())
LATE(void, PyEval_AcquireThread, (void *thread), (thread))
LATE(void, PyEval_RestoreThread, (void *thread), (thread))
