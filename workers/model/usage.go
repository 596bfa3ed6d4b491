package model

// maxCount bounds one token count. No call comes near it; it keeps nonsense
// from a provider out of the sums and their products with prices.
const maxCount = 1_000_000_000

// count makes a provider's number usable as a token count.
func count(n int64) int64 { return max(0, min(n, maxCount)) }

// EstimateUsage says what a call consumed whose usage never arrived: a token
// for every four bytes that were sent, and for every four of partialText that
// came back. The result is marked Estimated and has no cost; Registry.Cost
// knows that.
func EstimateUsage(req *Request, partialText string) Usage {
	return estimate(req, len(partialText))
}

func estimate(req *Request, outputBytes int) Usage {
	input := len(req.System)
	for _, fact := range req.Facts {
		input += len(fact.Key) + len(fact.Value)
	}
	for _, tool := range req.Tools {
		input += len(tool.Name) + len(tool.Description) + len(tool.Parameters)
	}
	for _, message := range req.Messages {
		input += len(message.Text)
		for _, call := range message.Calls {
			input += len(call.Tool) + len(call.Args)
		}
	}
	return Usage{Input: quarter(input), Output: quarter(outputBytes), Estimated: true}
}

// quarter converts bytes to estimated tokens, rounding up.
func quarter(bytes int) int64 { return int64(bytes+3) / 4 }
