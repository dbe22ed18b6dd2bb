"use strict";
// What is wrong with what a person typed into a field of numbers.

const lemaForm = (() => {
  // What a field takes: `min` and `max` are the texts of its attributes, `step` is "any" or empty (whole numbers).
  const taken = ({ min, max, step }) => {
    const number = step === "any" ? "a number" : "a whole number";
    return max === "" ? `${number} of ${min} or more` : `${number} from ${min} to ${max}`;
  };

  // A sentence; empty: the field has what it takes. `bad`: the browser could not read what is there as a number.
  const faultOf = ({ label, value, bad, required, min, max, step }) => {
    if (value === "" && !bad) return required ? `${label}: ${taken({ min, max, step })} is missing.` : "";
    const number = bad ? NaN : Number(value);
    const fits = Number.isFinite(number) && (step === "any" || Number.isInteger(number)) &&
      (min === "" || number >= Number(min)) && (max === "" || number <= Number(max));
    return fits ? "" : `${label}: ${bad ? "what is there" : value} is not ${taken({ min, max, step })}.`;
  };
  return { faultOf };
})();
