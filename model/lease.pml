/* The lease, its renewal, the claim and the fenced write, as the package has them.
 *
 * CALLERS processes acquire one lock, read a row, and write what they have read plus one; the first does so ROUNDS times.
 * A process that does not go on for a while is paused, one that never goes on is dead: Spin tries each order of all steps.
 *
 * A comment that begins with "=" names the functions of the package that an action stands for; a test compares them.
 * check.py beside this file has the list of the variations (#ifdef), and of what must hold in each.
 */

#ifndef CALLERS
#define CALLERS 2
#endif
#ifndef ROUNDS
#define ROUNDS 2
#endif
#ifndef RENEWED
#define RENEWED CALLERS             /* so many of them have a thread that renews */
#endif
#ifndef MISHAPS
#define MISHAPS 1
#endif
#define GRANTS (CALLERS - 1 + ROUNDS)   /* so many tokens are given: a number has to end somewhere */

/* The promises that are asserted. */
#ifndef EXCLUSION
#define EXCLUSION 0
#endif
#ifndef TOKENS
#define TOKENS 0
#endif
#ifndef UPDATES
#define UPDATES 0
#endif

/* What is asserted to see that it is false: otherwise there was little to search. */
#ifndef NOT_FINISHED
#define NOT_FINISHED 0
#endif
#ifndef NOT_REFUSED
#define NOT_REFUSED 0
#endif

/* The ttl in ticks, and what a holder takes off its own deadline because its clock may be slow. */
/* = django_distlock.ground.clock.drift */
#ifndef TTL
#define TTL 2
#endif
#ifndef DRIFT
#define DRIFT 0
#endif

mtype = { NOTHING, ACQUIRE, EXTEND, RELEASE, GRANTED, BUSY, YES, NO }; /* what is on a connection */
mtype = { PENDING, HELD, LOST, RELEASED };                             /* the state of a lease */

/* The record of the lock on its server. */
byte owner;             /* 0: nobody */
byte left;              /* ticks until the server ends the lease */
byte latest;            /* the last token */
byte clock;             /* the clock of the server, which has passed every token that was given before a purge */
bool guarded;           /* an open transaction has locked the token */

/* The fence of the row under protection. */
byte fence;

/* How often a request may still arrive late, or an operator act; whether the clock of a process has missed a tick. */
byte mishaps = MISHAPS;
bool is_slow;

typedef Lease {
    mtype state = RELEASED;
    byte owner;
    byte token;
    byte remaining;     /* ticks until the deadline, by the clock of the process */
    mtype call = NOTHING; /* the connection of the caller */
    byte asked;         /* ticks since before its request was sent */
    byte late;          /* the owner in an earlier request of this caller that is still under way */
    mtype renewal = NOTHING; /* the connection of the thread that renews */
    byte renewing;      /* ticks since before its request was sent */
    byte renewed;       /* the owner in its request */
    bool fresh;         /* nobody has written the row since this caller read it */
}
Lease lease[CALLERS];

#define me lease[i]
#define is_sure(i) (lease[i].state == HELD && lease[i].remaining > 0)
#define rounds(i) (i == 0 -> ROUNDS : 1)
#define is_free (owner == 0 || left == 0)
#define is_owned_by(asking) (owner == asking && left > 0)
#define less(ticks, by) ((ticks) > (by) -> (ticks) - (by) : 0)
#define older(ticks) ((ticks) < TTL - DRIFT -> (ticks) + 1 : TTL - DRIFT)    /* no deadline is left after that */

#ifdef CLOCK_OF_THE_REPLY
#define deadline(asked) (TTL - DRIFT)
#else
#define deadline(asked) less(TTL - DRIFT, asked)
#endif

/* The server: one statement or one script each. */

/* = django_distlock.backends.redis.scripts.ACQUIRE django_distlock.backends.database.dialect.Dialect.try_acquire */
#define may_acquire(asking) (is_owned_by(asking) || (is_free && !guarded && clock < GRANTS))

inline serve_acquire(asking) {
    if
    :: is_owned_by(asking)              /* it asks again: the same grant */
    :: else -> give_token(); owner = asking
    fi;
    left = TTL
}

inline give_token() {
#ifdef PLAIN_COUNTER
    latest++;
#else
    latest = (latest > clock -> latest : clock) + 1;
#endif
    assert(!TOKENS || latest > clock);
    clock = (latest > clock -> latest : clock)
}

/* = django_distlock.backends.redis.scripts.EXTEND django_distlock.backends.database.dialect.Dialect.extend */
inline serve_extend() {
    if
#ifdef RENEWAL_TAKES_AGAIN
    :: true -> owner = me.renewed; left = TTL; me.renewal = YES
#else
    :: is_owned_by(me.renewed) -> left = TTL; me.renewal = YES
    :: else -> me.renewal = NO
#endif
    fi
}

/* = django_distlock.backends.redis.scripts.RELEASE django_distlock.backends.database.dialect.Dialect.release */
inline serve_release() {
    if
#ifdef NO_OWNER_COMPARE
    :: true -> owner = 0; left = 0
#else
    :: owner == me.owner -> owner = 0; left = 0
    :: else
#endif
    fi;
    me.call = NOTHING; me.owner = 0; me.token = 0
}

/* The two connections of a process. A reply that is lost or late is asked for again, by the same owner,
 * while the first request may still arrive. */
proctype Network(byte i) {
end:
    do
    :: atomic { me.call == ACQUIRE && may_acquire(me.owner) ->
        serve_acquire(me.owner); me.token = latest; me.call = GRANTED }
    :: atomic { me.call == ACQUIRE && !may_acquire(me.owner) -> me.call = BUSY }
    :: atomic { me.call == RELEASE -> serve_release() }
    :: atomic { me.renewal == EXTEND -> serve_extend() }
    /* = django_distlock.engine.steps.settled */
    :: atomic { me.call == GRANTED -> me.token = 0; me.call = ACQUIRE; me.asked = 0 }
    :: atomic { mishaps > 0 && me.call == ACQUIRE && me.late == 0 ->
        mishaps--; me.late = me.owner; me.asked = 0 }
    :: atomic { me.late != 0 && may_acquire(me.late) -> serve_acquire(me.late); me.late = 0 }
    od
}

/* The caller, and its lease. */

/* = django_distlock.engine.acquisition.acquire django_distlock.engine.values.new_owner */
inline ask() {
    atomic {
        round++;
        me.state = PENDING; me.owner = i + CALLERS * round; me.call = ACQUIRE; me.asked = 0
    }
}

/* = django_distlock.engine.acquisition.Attempt.steps */
inline ask_again() {
    atomic { me.call == BUSY -> me.call = ACQUIRE; me.asked = 0 }
}

/* = django_distlock.engine.holding.Holding.grant */
inline hold() {
    atomic {
        me.call == GRANTED ->
        me.remaining = deadline(me.asked); me.call = NOTHING; me.asked = 0;
        if
        :: me.remaining > 0 -> me.state = HELD; at_most_one_is_sure()
        :: else -> me.state = LOST      /* the grant came too late, and is given back */
        fi
    }
}

inline at_most_one_is_sure() {
    assert(!EXCLUSION || is_sure(0) + is_sure(1) + is_sure(CALLERS - 1) * (CALLERS > 2) <= 1)
}

/* = django_distlock.engine.holding.Holding.check */
inline check() {
    atomic {
        if
        :: is_sure(i)
        :: else -> me.state = LOST; me.remaining = 0; goto leave
        fi
    }
}

/* = django_distlock.engine.fencing.claim */
inline claim() {
    atomic {
        if
        :: fence <= me.token -> fence = me.token
        :: else -> goto leave
        fi
    }
}

/* = django_distlock.engine.fencing._claimed_row */
inline read() {
    me.fresh = true
}

/* = django_distlock.engine.fencing.Claim.save django_distlock.engine.fencing.update */
inline write() {
    atomic {
        if
#if defined(WITHOUT_FENCE)
        :: true
#elif defined(WITHOUT_CLAIM)
        :: fence <= me.token -> fence = me.token
#else
        :: fence == me.token
#endif
        :: else -> assert(!NOT_REFUSED); goto leave
        fi;
        write_row()
    }
}

inline write_row() {
    assert(!UPDATES || me.fresh);
    lease[0].fresh = false; lease[1].fresh = false; lease[CALLERS - 1].fresh = false
}

/* = django_distlock.engine.lease.Lease.guard django_distlock.backends.database.dialect.Dialect.guard */
inline guard() {
    atomic {
        !guarded ->
        if
        :: latest == me.token -> guarded = true
        :: else -> goto leave
        fi
    }
}

inline write_and_commit() {
    atomic { write_row(); guarded = false }
}

/* = django_distlock.engine.holding.Holding.give_back_now */
inline release() {
    atomic { me.state = RELEASED; me.remaining = 0; me.fresh = false; me.call = RELEASE };
    me.call == NOTHING
}

proctype Caller(byte i) {
    byte round;
    do
    :: round < rounds(i) ->
        ask();
        do
        :: ask_again()
        :: hold() -> break
        od;
        check();
#if defined(GUARD)
        guard(); read(); write_and_commit();
#elif defined(GUARD_AFTER_READ)
        read(); guard(); write_and_commit();
#elif defined(CLAIM_AFTER_READ)
        read(); claim(); write();
#elif defined(WITHOUT_CLAIM) || defined(WITHOUT_FENCE)
        read(); check(); write();
#else
        claim(); read(); write();
#endif
        assert(!NOT_FINISHED || round < rounds(i));
leave:
        release()
    :: else -> break
    od
}

/* The thread that renews. */

/* = django_distlock.engine.holding.Holding.confirm */
inline confirm() {
    if
    :: me.state == HELD && me.owner == me.renewed && deadline(me.renewing) > me.remaining ->
        me.remaining = deadline(me.renewing);
        at_most_one_is_sure()
    :: else                             /* that lease has ended */
    fi
}

/* = django_distlock.engine.holding.Holding.end */
inline lose() {
    if
    :: me.state == HELD && me.owner == me.renewed -> me.state = LOST; me.remaining = 0
    :: else
    fi
}

inline forget_renewal() {
    me.renewal = NOTHING; me.renewing = 0; me.renewed = 0
}

/* = django_distlock.engine.registry.Registry._extend_together */
proctype Renewals(byte i) {
end:
    do
    :: atomic { is_sure(i) && me.renewal == NOTHING -> me.renewal = EXTEND; me.renewed = me.owner }
    :: atomic { me.renewal == YES -> confirm(); forget_renewal() }
#ifdef REFUSAL_COUNTS
    :: atomic { me.renewal == NO -> confirm(); forget_renewal() }
#else
    :: atomic { me.renewal == NO -> lose(); forget_renewal() }
#endif
    /* The reply is lost: the deadline decides. */
    /* = django_distlock.engine.holding.Holding.endanger */
    :: atomic { me.renewal == YES || me.renewal == NO -> forget_renewal() }
    od
}

/* Time passes for all at once. */

/* = django_distlock.ground.clock.lease_time */
inline tick(i) {
    if
    :: lease[i].remaining = less(lease[i].remaining, 1);
        lease[i].asked = (lease[i].call == ACQUIRE || lease[i].call == GRANTED -> older(lease[i].asked) : 0);
        lease[i].renewing = (lease[i].renewal != NOTHING -> older(lease[i].renewing) : 0)
#ifdef SLOW_CLOCK
    :: !is_slow -> is_slow = true       /* the clock of this process misses the tick */
#endif
    fi
}

proctype Time() {
end:
    do
    :: atomic {
        left = less(left, 1);
        tick(0);
        tick(1);
#if CALLERS > 2
        tick(2);
#endif
        skip
    }
    od
}

/* Operators, and what the page of guarantees answers with F. */
proctype Operators() {
end:
    do
    /* = django_distlock.backends.database.purge.purge */
#ifdef PURGE_OF_THE_LIVING
    :: atomic { mishaps > 0 && !guarded -> mishaps--; latest = 0; owner = 0; left = 0 }
#else
    :: atomic { mishaps > 0 && !guarded && is_free -> mishaps--; latest = 0; owner = 0; left = 0 }
#endif
#ifdef FAULTS
    /* = django_distlock.backends.base.BaseLockBackend.force_release django_distlock.backends.redis.scripts.FORCE */
    :: atomic { mishaps > 0 && !guarded -> mishaps--; give_token(); owner = 0; left = 0 }
    /* The server loses its data. */
    :: atomic { mishaps > 0 && !guarded -> mishaps--; latest = 0; owner = 0; left = 0 }
    /* The clock of the server jumps ahead. */
    :: atomic { mishaps > 0 -> mishaps--; left = 0 }
#endif
    od
}

init {
    atomic {
        byte i;
        for (i : 0 .. CALLERS - 1) {
            run Caller(i);
            run Network(i)
        }
        for (i : 0 .. RENEWED - 1) {
            run Renewals(i)
        }
        run Time();
        run Operators()
    }
}
