/* common/proto/methods.h - the numbers of the methods on the wire: append only, never reused */
#pragma once

enum fl_method {
    /* daemon to head */
    FL_NODE_JOIN = 1,      /* JoinRequest -> JoinReply       */
    FL_NODE_BEAT = 2,      /* event Beat                     */
    FL_WORKER_CHANGED = 3, /* WorkerState -> empty           */
    FL_LOG_PUSH = 4,       /* LogPush -> LogPushed           */
    FL_RELAY = 5,          /* Relay -> reply of that method  */
    FL_NODE_LEAVE = 6,     /* Shutdown -> empty: going away on purpose */
    FL_PACKAGE_READ = 7,   /* PackageRead -> PackagePiece + blob */
    /* head to daemon */
    FL_LEASE_PREPARE = 32, /* LeasePrepare -> LeasePrepared  */
    FL_LEASE_COMMIT = 33,  /* LeaseIds -> empty              */
    FL_LEASE_RELEASE = 34, /* LeaseIds -> empty              */
    FL_WORKER_START = 35,  /* WorkerSpec -> empty            */
    FL_WORKER_STOP = 36,   /* WorkerStop -> empty            */
    FL_DELIVER = 37,       /* event Deliver                  */
    FL_NODE_SHUTDOWN = 38, /* Shutdown -> empty              */
    FL_WORKER_ENV = 39,    /* WorkerEnvAsk -> WorkerEnv      */
    FL_NODE_FENCED = 40,   /* event Shutdown: this node was given up, and ends what it runs */
    /* worker to daemon */
    FL_WORKER_READY = 64,  /* WorkerReady -> empty           */
    FL_METRIC = 65,        /* event Metric                   */
    FL_PROGRESS = 66,      /* event Progress                 */
    /* daemon to worker */
    FL_EV_STOP = 96,       /* event WorkerStopping           */
    FL_EV_SQUEEZE = 97,    /* Squeeze -> uint64              */
    FL_EV_MEMBERS = 98,    /* event Members, to the driver   */
    /* worker to head, relayed by the daemon: 128 to 191 */
    FL_RELAYED_FIRST = 128,
    FL_DIR_FIND = 128,       /* Find -> Where                */
    FL_GROUP_PLACE = 129,    /* Place -> Layout              */
    FL_WORKERS_LAUNCH = 130, /* Launch -> Members            */
    FL_ROLE_END = 131,       /* Role -> empty                */
    FL_ROLE_RESTART = 132,   /* Role -> Members              */
    FL_GROUP_END = 133,      /* Group -> empty               */
    FL_MEMBERS_LIST = 134,   /* empty -> Members of the job; from then on EV_MEMBERS follow */
    FL_STEP_RECORD = 135,    /* StepRecord -> empty          */
    FL_MEMBER_END = 136,     /* MemberEnd -> empty: its end comes with EV_MEMBERS */
    FL_RELAYED_LAST = 191,
    /* worker to worker */
    FL_ASK = 192,            /* Ask + blob -> Answer + blob  */
    FL_XFER_FIRST = 256,     /* the weight plane, transport/xfer: 256 to 319 */
    FL_XFER_RECONCILE = 256, /* XferReconcile -> XferReport + manifest  */
    FL_XFER_BEGIN = 257,     /* XferBegin + part -> XferBegun + digests, or XferReport */
    FL_XFER_WAIT = 258,      /* XferWait -> XferReport                  */
    FL_XFER_VERIFY = 259,    /* XferVerify -> XferReport                */
    FL_XFER_COMMIT = 260,    /* XferCommit -> XferReport, when flipped  */
    FL_XFER_ABORT = 261,     /* XferAbort -> XferReport, when quiet     */
    FL_XFER_RESUME = 262,    /* XferResume -> XferReport                */
    FL_XFER_END = 263,       /* XferEnd -> XferReport, when quiet       */
    FL_XFER_WATCH = 264,     /* XferWatch -> XferReport                 */
    FL_XFER_GRANT = 265,     /* XferGrant -> XferReport                 */
    FL_XFER_KEY = 266,       /* XferKey -> XferKeyIs + descriptors      */
    FL_XFER_CHECK = 267,     /* XferCheck + segments -> digests         */
    FL_XFER_STAGE = 268,     /* XferStage -> XferStaged                 */
    FL_XFER_LAST = 319
};
