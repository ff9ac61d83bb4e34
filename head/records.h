/* head/records.h - the kinds of the journal's records: append only, never reused */
#pragma once

/* clang-format off */
enum rec_kind {                /* message of common/proto/journal.proto */
    REC_HEAD = 1,              /* HeadRec                               */
    REC_NODE = 2,              /* NodeRec                               */
    REC_JOB = 3,               /* JobRec                                */
    REC_GROUP = 4,             /* GroupRec                              */
    REC_LEASE = 5,             /* Lease                                 */
    REC_LEASES_FREED = 6,      /* LeaseIdsRec                           */
    REC_ROLE = 7,              /* RoleRec                               */
    REC_SEAT = 8,              /* SeatRec                               */
    REC_DECISION = 9,          /* DecisionRec                           */
    REC_GONE = 10,             /* GoneRec                               */
};
/* clang-format on */
