// Package load puts load on the API of weir and measures what it answers.
//
// # Two loops
//
// A closed loop has a number of users. Each sends a turn, waits for its answer
// and sends the next: a slow server is asked less. It finds how much the server
// can do at most. An open loop has a rate. Turns arrive when they are due,
// whatever became of those before: this is how people and other systems arrive.
// It finds what the server is like at that rate.
//
// A latency of the open loop counts from the time at which the turn was due, not
// from when it was sent. Otherwise a server that stops for a second would delay
// the one turn that is under way and hide the thousand that could not be sent in
// the meantime (coordinated omission). How late turns were sent is measured too
// (Result.LatenessMs): it says whether the generator itself kept up. Turns under way are
// bounded by Config.MaxInFlight; an arrival that finds no place is not sent
// later, which would make the loop a closed one, but counted as unsent.
//
// # Arrivals
//
// A Ramp is a rate over time, made of straight lines. Its integral N(t) is the
// number of arrivals that are due by t, and so the k-th arrival is due where N
// reaches k: at k - 1/2 for even spacing, and at a sum of k exponentially
// distributed steps of mean 1 for a Poisson process (which is thereby one of a
// rate that changes). Both are exact whatever the ramp, and no error adds up.
//
// # What counts
//
// Turns that are due in the warm-up are sent and forgotten. Those that are due
// in the window behind it count, also when they end after it: to leave out the
// slowest would be a lie about latency. Throughput is the answers that came
// within the window, by its length; answers to turns of the warm-up are among
// them, as those of the window that come later are not.
//
// # Cost
//
// The generator must not be what is measured. Each place in flight has a
// connection and a goroutine of its own, which writes a request that was made
// beforehand, in which only the session's name changes, and reads the answer in
// place.
package load
