package db

// UnitStepCopy queues the query of that name.
func (p *Pipeline) UnitStepCopy(a UnitStepCopyParams) {
	p.batch.Queue(unitStepCopy, a.OldIds, a.NewIds)
}
